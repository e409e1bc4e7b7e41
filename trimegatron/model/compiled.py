"""``--compile``: each layer as one graph of torch.compile's.

A layer is the piece: small to compile, and what lies between layers (hooks that wait for parameters, recomputation,
the pipeline's cuts) stays as it is. Layers share one graph, unless there is dropout: a mask is a function of the
layer's number, which is then a constant of the graph. The kernels are operators within it.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from trimegatron.errors import ConfigError
from trimegatron.model.gpt import GPTStage

FORMS_OF_A_LAYER = 4
"""Graphs that a layer may have, and room to spare: training, evaluation, each with another sequence length once."""


def compile_layers(stages: Iterable[nn.Module], *, backend: str = "inductor") -> None:
    """Let every layer of ``stages`` be compiled when it is first called, for the shapes it is called with.

    What cannot be one graph is an error of torch's there, never run in pieces without a word.
    """
    layers: list[nn.Module] = []
    for stage in stages:
        assert isinstance(stage, GPTStage)
        layers += stage.layers.values()
    # Graphs of all layers count together, and beyond its limit torch would not compile any more.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, FORMS_OF_A_LAYER * len(layers))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
    for layer in layers:
        # Not the module's own ``compile``, which takes its hooks into the graph.
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, backend=backend)


def check_compiler(device: torch.device) -> None:
    """On a CPU torch.compile writes C++.

    Raises:
        ConfigError: there is nothing here that compiles it.
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = []
    if shutil.which(compiler) is None:
        missing.append(f"the C++ compiler {compiler}")
    if not header.is_file():
        missing.append(f"Python's header {header}")
    if device.type == "cpu" and missing:
        raise ConfigError(
            f"--compile on a CPU needs {' and '.join(missing)}, and there is none. Install it (on Debian: apt-get "
            "install g++ python3-dev), name a compiler in CXX, or leave --compile out"
        )
