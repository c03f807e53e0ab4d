"""The network of a finished run as one file for other programs: raw items in, probabilities of the classes out.

Images are uint8 (n, channels, H, W), features (n, d) float32; scaling and the mean over mirrored and moved images,
where the run has it, are inside. The names of the classes are in the file too.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from urrl.data.augment import AnyPolicy, Features
from urrl.errors import UserError
from urrl.evaluate import looks, mean_probability
from urrl.files import write_atomic
from urrl.nets import Network
from urrl.predict import load_model


class Exported(nn.Module):
    """What `urrl predict` computes."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: Network, policy: AnyPolicy, flip: bool, move: int):
        super().__init__()
        self.net = net
        self.flip, self.move = flip, move
        axes = (1, -1) if isinstance(policy, Features) else (1, -1, 1, 1)
        scale = 1.0 if isinstance(policy, Features) else 255.0
        self.register_buffer("mean", torch.tensor(policy.mean).view(axes) * scale)
        self.register_buffer("std", torch.tensor(policy.std).view(axes) * scale)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.float() - self.mean) / self.std
        return mean_probability([(weight, self.net(look)) for weight, look in looks(x, self.flip, self.move)])


def load_exported(folder: Path) -> tuple[Exported, Tensor, str]:
    """(module, two items to trace it with, the class names as JSON)."""
    net, training, policy, classes, shape = load_model(folder, "cpu")
    rng = torch.Generator().manual_seed(0)
    if isinstance(policy, Features):
        for number, (mean, std) in enumerate(zip(policy.mean, policy.std)):
            if abs(mean) > (1e7 if std == 1 else 1e5) * std:  # single precision keeps seven digits; 1: hardly varies
                told = f"{folder}: feature {number} is about {mean:g} and varies by {std:.3g}"
                raise UserError(f"{told}, too little for the single precision of an export: take its mean off")
        x = torch.randn(2, *shape, generator=rng) * torch.tensor(policy.std) + torch.tensor(policy.mean)
    else:
        x = torch.randint(256, (2, *shape), generator=rng).to(torch.uint8)
    module = Exported(net, policy, training.flip_test, training.move_test).eval()
    return module, x, json.dumps(classes, ensure_ascii=False)


def export_torch(folder: Path, out: Path) -> None:
    """For `torch.export.load(FILE).module()`."""
    module, x, classes = load_exported(folder)
    program = torch.export.export(module, (x,), dynamic_shapes={"x": {0: torch.export.Dim("n")}})
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, lambda file: torch.export.save(program, file, extra_files={"classes.json": classes}))


def export_onnx(folder: Path, out: Path) -> None:
    """Input `x`, output `probabilities`; checked with onnxruntime before it is written."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  # torch needs it
    except ImportError as error:
        raise UserError(f"ONNX needs more packages: pip install 'urrl[onnx]' ({error})") from None
    module, x, classes = load_exported(folder)
    with _quiet():
        program = torch.onnx.export(
            module, (x,), dynamo=True, input_names=["x"], output_names=["probabilities"],
            dynamic_shapes={"x": {0: torch.export.Dim("n")}}, verbose=False,
        )  # fmt: skip
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, {"classes": classes})
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    three = torch.cat([x, x[:1]])  # another number of items than was traced
    (there,) = session.run(None, {"x": three.numpy()})
    with torch.no_grad():
        here = module(three)
    if not torch.allclose(torch.from_numpy(there), here, atol=1e-4):
        raise RuntimeError("the exported model computes other probabilities than the run's network")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, lambda file: file.write(content))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of its own steps on every channel there is."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
