"""One process of a data-parallel tiny run: rank, processes, meeting file, checkpoint folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from moonlet.train.process_group import Gloo, prepare_process
from tests.train.runs import tiny_trainer
from tests.train.test_trainer import recipe


def main() -> None:
    rank, processes = int(sys.argv[1]), int(sys.argv[2])
    prepare_process()
    group = Gloo(rank, processes, Path(sys.argv[3]))
    tiny_trainer(recipe(), group).run(lambda m: None, checkpoints=Path(sys.argv[4]))
    group.close()


if __name__ == "__main__":
    main()
