"""Makes `logits.npz`: what transformers computes from the checkpoints of `support/checkpoints.py`, in f32.

Not part of the test run. Needs `pip install torch transformers safetensors gguf numpy`; run from the repository's root:
    PYTHONPATH=tests python tests/golden/convert/make_logits.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from support.checkpoints import CONFIGS, golden_columns, golden_tokens, write_checkpoint


def main() -> None:
    torch.manual_seed(0)
    logits = {}
    for variant, config in CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), config)
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
        if report["missing_keys"] or report["unexpected_keys"]:
            raise SystemExit(f"{variant}: transformers reads other tensors: {report}")
        with torch.no_grad():
            all_logits = model(torch.tensor([golden_tokens(config)]), use_cache=False).logits[0].float().numpy()
        logits[variant] = np.ascontiguousarray(all_logits[:, golden_columns(config)])
        print(variant, logits[variant].shape, f"spread {logits[variant].std():.2f}")
    np.savez_compressed(Path(__file__).with_name("logits.npz"), **logits)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
