import importlib.metadata
import subprocess
import sys

import pytest

import moonlet

HEAVY = ("torch", "fastapi", "starlette", "numpy", "rich", "safetensors")


def output_of(script: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = f"import sys, moonlet; print(*[x for x in {HEAVY!r} if x in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_importing_core_and_chat_loads_no_torch() -> None:
    script = (
        "import importlib, pkgutil, sys\n"
        "import moonlet.core, moonlet.chat\n"
        "for package in (moonlet.core, moonlet.chat):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_the_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("moonlet") == moonlet.__version__


def test_every_public_name_resolves() -> None:
    assert {*moonlet._HOMES, "__version__"} == set(moonlet.__all__) == set(dir(moonlet))
    for name in moonlet.__all__:
        assert getattr(moonlet, name) is not None


def test_the_public_names_are_these() -> None:
    """A name added or taken away is a decision, and shows up here."""
    assert set(moonlet.__all__) == {
        "Checkpoint",
        "Engine",
        "EngineRequest",
        "ModelConfig",
        "MoonletError",
        "Parser",
        "SamplingParams",
        "Tokenizer",
        "Transformer",
        "__version__",
        "load_model",
        "read_config",
        "render",
        "save_model",
    }


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = moonlet.nonsense
