"""Entry point of ``moonlet``: commands, and what a failure looks like.

Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 3 capacity, 130 interrupted. A known
failure is one line on stderr; ``MOONLET_DEBUG=1`` shows its traceback instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

import moonlet
from moonlet.core.env import is_debug
from moonlet.core.errors import CapacityError, MoonletError

__all__ = ["app", "main", "run"]

EXIT_FAILED, EXIT_USAGE, EXIT_CAPACITY, EXIT_INTERRUPTED = 1, 2, 3, 130

app = App(
    name="moonlet",
    help="The Kimi K3 system as one package: serve, chat, inspect, train.",
    version=moonlet.__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
# what the overview shows stands here, so that printing it imports no command
for _name, _help, _example in (
    (
        "serve",
        "Serve a checkpoint over an OpenAI-compatible HTTP API.",
        "moonlet serve --port 8000",
    ),
    (
        "chat",
        "Chat in the terminal, with a checkpoint or an OpenAI-compatible endpoint.",
        'echo "What is 123+456?" | moonlet chat',
    ),
    (
        "train",
        "Train a model from a recipe.",
        "moonlet train nano --out runs/nano",
    ),
    (
        "synth",
        "Write a checkpoint of random weights in the published layout.",
        "moonlet synth out/slab --scale slab-224",
    ),
):
    app.command(
        f"moonlet.cli.{_name}:{_name}_command",
        name=_name,
        help=_help,
        help_epilogue=f"Example: `{_example}`",
    )

app.command(
    "moonlet.cli.bench:bench_app",
    name="bench",
    help="Measure speed against the bound of this machine, or put load on a server.",
)

AsJson = Annotated[bool, Parameter(name="--json", negative="")]


@app.command
def inspect(directory: Path, /, *, as_json: AsJson = False) -> int:
    """Show a checkpoint's architecture, exact sizes and verification.

    Example: `moonlet inspect DIR --json`

    Parameters
    ----------
    directory
        Checkpoint directory; with a configuration and index only, weights count as absent.
    as_json
        Print one JSON object instead of tables.
    """
    from moonlet.cli.inspect import inspect_command

    return inspect_command(directory, as_json)


@app.command
def env(*, as_json: AsJson = False) -> None:
    """Print versions, device and the chosen kernels with the reasons.

    Example: `moonlet env --json`

    Parameters
    ----------
    as_json
        Print one JSON object instead of tables.
    """
    from moonlet.cli.env import env_command

    env_command(as_json)


def main() -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code.
    """
    debug = False
    try:
        debug = is_debug()
        result = app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return _fail(_one_line(error), EXIT_USAGE)
    except MoonletError as error:
        if debug:
            raise
        code = EXIT_CAPACITY if isinstance(error, CapacityError) else EXIT_USAGE
        return _fail(str(error), code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # whoever read our output has seen enough
        sys.stderr.close()
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def _one_line(error: CycloptsError) -> str:
    return " ".join(str(error).split())


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"moonlet: {message}\n")
    return code
