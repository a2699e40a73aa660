"""``moonlet synth``: random weights in the published layout, with progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from moonlet.cli.models import load_progress
from moonlet.core.config import ModelConfig
from moonlet.core.errors import ConfigError
from moonlet.core.hf_config import read_config
from moonlet.core.units import format_bytes

__all__ = ["synth_command"]


def synth_command(
    out: Path,
    /,
    *,
    scale: str | None = None,
    config: Path | None = None,
    seed: int = 0,
    tokenizer: Path | None = None,
    force: Annotated[bool, Parameter(negative="")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Write a checkpoint of random weights in the published layout.

    Example: `moonlet synth out/slab --scale slab-224`

    Parameters
    ----------
    out
        Folder of the checkpoint; it appears when everything is written.
    scale
        Name of a shipped architecture: k3-quarter (7.4 GB), slab-224 (12.9 GB) or slab-896
        (40.6 GB).
    config
        Architecture instead of a scale: a published config.json, its folder, or a .toml file
        with a [model] table.
    seed
        The same seed gives the same bytes.
    tokenizer
        Folder whose tokenizer files are copied; its size must be that of the vocabulary.
    force
        Replace the checkpoint that is there, once the new one is whole.
    as_json
        Print one JSON object instead of the folder's name.
    """
    source = _source(scale, config)

    from moonlet.weights.synth import write_synthetic

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    started = time.monotonic()
    with load_progress(f"writing {out.name}", console) as advance:

        def show(done: int, total: int) -> None:
            if done == 0:
                console.print(f"{total:,} bytes ({format_bytes(total)}) of weights, seed {seed}")
            advance(done, total)

        saved = write_synthetic(source, out, seed, show, tokenizer=tokenizer, overwrite=force)
    if as_json:
        facts = {
            "directory": str(saved.directory),
            "num_tensors": saved.num_tensors,
            "total_size": saved.total_size,
            "seed": seed,
            "elapsed_s": round(time.monotonic() - started, 3),
        }
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        sys.stdout.write(f"{saved.directory}\n")
    return 0


def _source(scale: str | None, config: Path | None) -> ModelConfig | Mapping[str, Any]:
    """Return the architecture that was asked for."""
    from moonlet.weights.scale import load_scale, read_model_table, scale_names

    if scale is not None and config is None:
        return load_scale(scale)
    if config is not None and scale is None:
        return read_model_table(config) if config.suffix == ".toml" else read_config(config).raw
    raise ConfigError(
        f"give either --scale ({', '.join(scale_names())}) or --config with a file, one of the two"
    )
