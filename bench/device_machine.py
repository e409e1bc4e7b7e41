"""What the device is and what it can do at best: versions, clocks, bandwidth of a copy, rate of matrix products."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator

import torch

from trimegatron.bench.clock import repeat
from trimegatron.bench.device_timing import LAUNCHES, copy_rates
from trimegatron.bench.measure import versions
from trimegatron.bench.results import Result, measured
from trimegatron.metrics import peak_flops
from trimegatron.model.spec import GPTSpec

CLOCKS = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,temperature.gpu"


def describe(device: torch.device) -> Iterator[str]:
    """Lines: the device, the versions, its clocks."""
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        yield (
            f"{about.name}: {about.total_memory / 1e9:.0f} GB, {about.multi_processor_count} multiprocessors, compute "
            f"capability {about.major}.{about.minor}; CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        )
        yield clocks()
    else:
        yield f"{platform.processor() or platform.machine()}: no GPU, so no clocks"
    found = versions("torch", "triton", "transformers", "liger-kernel")
    yield ", ".join(f"{name} {version or 'is not installed'}" for name, version in found.items())


def clocks() -> str:
    """What ``nvidia-smi`` says, or why it says nothing."""
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return f"clocks unknown: {error}"
    return "clocks of every GPU here: " + "; ".join(
        ", ".join(f"{name} {value.strip()}" for name, value in zip(CLOCKS.split(","), line.split(","), strict=False))
        for line in answer
    )


def bandwidth(num_bytes: int, flush: torch.Tensor) -> Result:
    """A copy of so many bytes, which reads and writes them."""
    rates = [rate / 1e9 for rate in copy_rates(flush.device, flush, num_bytes)]
    return measured("copy", "torch", "bandwidth", "GB/s", rates, better="higher", num_bytes=num_bytes)


def matrix_rates(spec: GPTSpec, num_tokens: int, flush: torch.Tensor) -> Iterator[Result]:
    """The products of a layer's forward pass and of the head, in the model's dtype."""
    h, f = spec.hidden_size, spec.ffn_hidden_size
    peak = peak_flops(spec.device) if spec.dtype == torch.bfloat16 else None
    for name, inputs, outputs in (
        ("query, key, value", h, 3 * h), ("attention output", h, h), ("MLP up", h, f), ("MLP down", f, h),
        ("head", h, spec.vocab_size),
    ):  # fmt: skip
        x, weight = (torch.randn(rows, inputs, device=spec.device).to(spec.dtype) for rows in (num_tokens, outputs))
        out = torch.empty(num_tokens, outputs, device=spec.device, dtype=spec.dtype)

        def run(x: torch.Tensor = x, weight: torch.Tensor = weight, out: torch.Tensor = out) -> None:
            for _ in range(LAUNCHES):
                torch.mm(x, weight.t(), out=out)

        flops = 2 * num_tokens * inputs * outputs
        rates = [LAUNCHES * flops / seconds / 1e12 for seconds in repeat(run, flush)]
        yield measured(
            f"product: {name}", "torch", "matrix rate", "TFLOP/s", rates, better="higher",
            floor=None if peak is None else peak / 1e12, tokens=num_tokens, inputs=inputs, outputs=outputs,
            flops=flops, bytes=x.nbytes + weight.nbytes + out.nbytes,
        )  # fmt: skip
