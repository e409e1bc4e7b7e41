"""``python -m trimegatron.convert.fresh_process FOLDER TOKENS OUTPUT CONSTANT``: the logits of a Hugging Face model.

The process that a proof starts: it has nothing of ours in it, only transformers and the files.
"""

from __future__ import annotations

import re
import sys

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    """Load, run, write the logits [b, s, v] in fp32. Tensors whose names match ``CONSTANT`` may be of no use."""
    from transformers import AutoModelForCausalLM

    folder, tokens_file, output, constant = sys.argv[1:]
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    # What transformers would fill in by itself is no part of a conversion.
    wrong = {
        kind: names
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if (names := [name for name in info.get(kind) or () if not re.fullmatch(constant, str(name))])
    }
    if wrong:
        sys.exit(f"the model's tensors do not match: {wrong}")
    with torch.no_grad():
        logits = model.eval()(load_file(tokens_file)["tokens"]).logits
    save_file({"logits": logits.float().contiguous()}, output)


if __name__ == "__main__":
    main()
