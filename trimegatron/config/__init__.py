"""The configuration: frozen dataclasses from which the command line, ``--config``, ``--help`` and ``--explain`` come.

``options.py`` declares options, ``flags.py`` reads them; ``groups.py``, ``optimizer_group.py`` and ``io_groups.py``
hold the training options, ``config.py`` puts them together, ``checks.py`` holds the rules, ``compat.py`` Megatron-LM's
other options.
Nothing here imports torch.
"""

from trimegatron.config.checks import check_machine
from trimegatron.config.config import Config
from trimegatron.config.explain import explain
from trimegatron.config.groups import ModelConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from trimegatron.config.io_groups import CheckpointConfig, DataConfig, LoggingConfig
from trimegatron.config.optimizer_group import OptimizerConfig
from trimegatron.config.schedule import Schedule
from trimegatron.config.split import parse_split
from trimegatron.config.train_args import ExplainedConfig, parse_train_args, read_train_args

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "ExplainedConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "Schedule",
    "TrainingConfig",
    "check_machine",
    "explain",
    "parse_split",
    "parse_train_args",
    "read_train_args",
]
