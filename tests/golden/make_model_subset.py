"""Make `tests/golden/model` from the full set of model vectors.

    python tests/golden/make_model_subset.py FULL/model

Keeps the tiny_k3 checkpoint as it is, its results for prompts of 1, 7 and 65 tokens, and every
operator vector but the long KDA cases. tiny_kimi_linear and the released K3 files stay out.
"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent / "model"
LENGTHS = ("len1", "len7", "len65")
MAX_KDA_TOKENS = 70
WHOLE_OPS = ("attn_res", "mxfp4", "mxfp8", "norms", "router", "short_conv", "situ")


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def make_expected(source: Path, target: Path) -> None:
    """Drop the results of the longer prompts."""

    def is_kept(key: str) -> bool:
        return not key.startswith("len") or key.split(".")[0] in LENGTHS

    tensors = load_file(source / "expected.safetensors")
    save_file({k: v for k, v in tensors.items() if is_kept(k)}, target / "expected.safetensors")
    facts = json.loads((source / "expected.json").read_text())
    for name, value in facts.items():
        if isinstance(value, dict):
            facts[name] = {k: v for k, v in value.items() if is_kept(k)}
    write_json(target / "expected.json", facts)


def make_ops(source: Path, target: Path) -> None:
    """Drop the long KDA cases."""
    target.mkdir(parents=True, exist_ok=True)
    facts = json.loads((source / "ops.json").read_text())
    cases = facts["cases"]["kda"]
    kept = {k: v for k, v in cases.items() if v["T"] <= MAX_KDA_TOKENS}
    facts["cases"]["kda"] = kept
    write_json(target / "ops.json", facts)
    tensors = load_file(source / "kda.safetensors")
    short = {k: v for k, v in tensors.items() if k.split(".")[0] in kept}
    save_file(short, target / "kda.safetensors")
    for name in WHOLE_OPS:
        shutil.copyfile(source / f"{name}.safetensors", target / f"{name}.safetensors")


def main() -> None:
    source = Path(sys.argv[1])
    target = HERE / "tiny_k3"
    shutil.rmtree(HERE, ignore_errors=True)
    target.mkdir(parents=True)
    checkpoint = target / "checkpoint"
    checkpoint.mkdir()
    for path in sorted((source / "tiny_k3" / "checkpoint").iterdir()):
        shutil.copyfile(path, checkpoint / path.name)
    make_expected(source / "tiny_k3", target)
    make_ops(source / "ops", HERE / "ops")


if __name__ == "__main__":
    main()
