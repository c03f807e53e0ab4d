"""TensorBoard, for those who watch their runs there: every figure of metrics.jsonl, as it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from urrl.errors import UserError
from urrl.progress import Progress


class Board(Progress):
    """The usual progress, and the same to TensorBoard."""

    def __init__(self, folder: Path, quiet: bool = False):
        super().__init__(quiet)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("--tensorboard takes TensorBoard: pip install 'urrl[tensorboard]'") from None
        self.open = SummaryWriter
        self.folder = folder
        self.writer: Any = None

    def start(self, epochs: int, steps: int, done: int) -> None:
        super().start(epochs, steps, done)
        # What a killed run wrote beyond its last checkpoint is hidden.
        self.writer = self.open(str(self.folder), purge_step=done)

    def epoch(self, record: dict[str, Any]) -> None:
        super().epoch(record)
        for name, value in record.items():
            if value is not None and name != "epoch":
                self.writer.add_scalar(name, value, record["epoch"])
        self.writer.flush()

    def __exit__(self, *error: object) -> None:
        if self.writer is not None:
            self.writer.close()
        super().__exit__(*error)
