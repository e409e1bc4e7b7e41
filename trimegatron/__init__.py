"""Megatron-LM's GPT pretraining, rebuilt on Triton.

Importing this package does nothing else: no device query, no download, neither torch nor triton is loaded.
"""

__version__ = "0.1.0"
