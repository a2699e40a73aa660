"""`moonlet env`: versions, device, processor, and which kernel serves each operator, with reasons.

The output is what a bug report needs. Torch is imported when the command runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["collect", "env_command"]

_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tiktoken",
    "cyclopts",
    "rich",
    "fastapi",
    "uvicorn",
    "orjson",
)


def env_command(json_output: bool = False) -> None:
    """Print versions, device, instruction-set level and chosen kernels.

    Args:
        json_output: Print one JSON object instead of tables.
    """
    facts = collect()
    if json_output:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return
    console = Console(highlight=False)
    for name, value in facts.items():
        if name not in ("packages", "kernels"):
            console.print(f"{name.replace('_', ' '):<15} {_in_words(value)}", soft_wrap=True)
    packages = facts["packages"]
    console.print(
        f"{'packages':<15} " + ", ".join(f"{k} {v}" for k, v in packages.items()), soft_wrap=True
    )
    table = Table("operator", "backend", "reason", box=None, padding=(0, 3, 0, 0))
    for row in facts["kernels"]:
        table.add_row(row["op"], row["backend"], row["reason"])
    console.print()
    console.print(table)


def collect() -> dict[str, Any]:
    """Return the facts that `env_command` prints.

    Returns:
        Versions, platform, devices, processor, instruction-set level (None where the native
        kernels are absent), threads, and one entry per operator with its backend and the reason.

    Raises:
        ConfigError: ``MOONLET_CPU_ISA`` is malformed.
    """
    import torch

    import moonlet
    from moonlet.core import env
    from moonlet.kernels import _native, mxfp4, registry

    _, native = _native.availability()
    kernels = [
        {"op": c.op, "backend": c.backend, "reason": c.reason} for c in registry.describe("cpu")
    ]
    refusal = mxfp4.native_refusal(torch.device("cpu"), torch.float32)
    kernels.append(
        {
            "op": "mxfp4_dequantize",
            "backend": "reference" if refusal else "cpu",
            "reason": refusal or "first in order",
        }
    )
    return {
        "moonlet": moonlet.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": ["cpu", *_cuda_devices()],
        "processor": _processor(),
        "cores": env.available_cores(),
        "torch_threads": torch.get_num_threads(),
        "native_kernels": native.removeprefix("native kernels: "),
        "isa_level": _native.isa_level(),
        "isa_available": list(_native.isa_levels()),
        "packages": {name: _version(name) for name in _PACKAGES},
        "kernels": kernels,
    }


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cuda_devices() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
