"""The chat library stands alone."""

import subprocess
import sys


def test_text_needs_neither_torch_nor_an_engine() -> None:
    script = (
        "import sys, moonlet.chat, moonlet.chat.bpe\n"
        "names = {name.split('.')[0] for name in sys.modules}\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('moonlet.')}\n"
        "assert not names & {'torch', 'numpy', 'transformers', 'fastapi'}, names\n"
        "assert rooms <= {'chat', 'core'}, rooms\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
