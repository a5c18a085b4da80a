"""`python -m services.predictor.learning.fitter FOLDER PARENT`: one refit, apart."""

import os
import sys
from pathlib import Path

NICE = 10  # a forecast or a token that is due comes first


def main(folder: Path, parent: int) -> None:
    os.nice(NICE)
    import torch

    from services.predictor.learning.handover import read_task, write_result

    torch.set_num_threads(1)

    def tick(share: float) -> None:
        if os.getppid() != parent:
            sys.exit("whoever asked for the fit is gone")

    write_result(folder, read_task(folder).run(tick))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
