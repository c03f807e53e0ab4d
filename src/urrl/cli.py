"""`urrl ...`: the commands. torch is imported late, so that --help answers at once."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

import urrl
from urrl import interrupt
from urrl.allocator import keep_memory
from urrl.errors import Lost, UserError, one_line, printable

TRAIN_EXAMPLES = """examples:
  urrl train --dataset digits --eta 0.3 --mu 0.3                   URRL, half a minute, no download
  urrl train --dataset fmnist --eta 0.5 --mu 0.5 --recipe fast     small net, short schedule, for CPUs
  urrl train --dataset cifar10 --recipe paper --out runs/a         the paper's settings
  urrl train --images photos --candidates labels.csv --out runs/b  your own images; columns item, candidates (cat|lynx)
  urrl train --table t.parquet --features 'x*' --candidates labels your own feature vectors
  urrl train ... --out runs/a --resume                             go on where it stopped
  urrl train ... --set phi=0.8 --set w_m=3 --set lr=0.1            any option of the method or of the training

`urrl methods NAME` and `urrl recipes` list the options and their values.
"""

BENCH_EXAMPLES = """grids:
  paper:fmnist, paper:cifar10, paper:cifar100    the nine cells of a table, with the paper's seven methods
  paper:ablation, paper:phi                      the parts of URRL and its threshold, on CIFAR-10 and CIFAR-100
  paper:tsne                                     the methods of the t-SNE figure
  FILE.toml                                      keys are the options of `train`, lists multiply out:
      dataset = ["digits"]
      method = ["urrl", "proden"]
      eta = [0.3]
      mu = [0.1, 0.3]
      seed = [0, 1]
      set.width = [8]

examples:
  urrl bench paper:fmnist --subset 10000 --epochs 10 --jobs 2 --out runs/fmnist
  urrl bench paper:phi --datasets fmnist --seeds 1 --out runs/phi --dry-run

The same command goes on where it was stopped. `urrl report DIR` draws up the tables.
"""


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    top = Parser(
        prog="urrl", description="Learn from candidate labels that may be wrong.", formatter_class=plain,
        epilog="Start with: urrl demo      Help on a command: urrl train --help",
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"urrl {urrl.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def command(name: str, run: Any, help: str, epilog: str | None = None) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, epilog=epilog, formatter_class=plain)
        sub.set_defaults(run=run)
        return sub

    def add_cell(sub: argparse.ArgumentParser, own: bool = False) -> None:
        """What is learned from what."""
        sub.add_argument("--dataset", required=not own, metavar="NAME", help="see `urrl datasets`")
        sub.add_argument(
            "--eta",
            type=float,
            metavar="E",
            help="partial rate: a wrong label enters a set with this probability (default 0.3)",
        )
        sub.add_argument(
            "--mu",
            type=float,
            metavar="M",
            help="unreliable rate: the label is corrupted with this probability (default 0.3; 0 for a set's own)",
        )
        sub.add_argument(
            "--convention",
            metavar="NAME",
            help="how sets are drawn: paper (default), pico+, swap, fredis, clean, clean-forced",
        )
        sub.add_argument(
            "--seed", type=int, default=0, metavar="S", help="of the split, the sets and the training (default 0)"
        )
        sub.add_argument(
            "--split",
            metavar="KIND",
            help="paper: pooled 4:1:1 (default); official: the data set's own test part; fold:0 to fold:9: one of ten",
        )
        sub.add_argument("--subset", type=int, metavar="N", help="train on N items only")
        sub.add_argument(
            "--data-dir",
            type=Path,
            metavar="D",
            help="where the data files are (default: $URRL_DATA, the cache, or a download)",
        )

    def add_settings(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--epochs", type=int, metavar="N", help="instead of the recipe's")
        sub.add_argument(
            "--set",
            action="append",
            default=[],
            dest="settings",
            metavar="KEY=VALUE",
            help="any option of the method or the training; may be repeated",
        )

    def add_machine(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--device", default="auto", help="auto (default), cpu, cuda, mps ...")
        sub.add_argument("--threads", type=int, metavar="T", help="CPU threads (default: all)")
        sub.add_argument("--quiet", action="store_true", help="no progress display")

    sub = command(
        "train", _train, "Train one method on one data set with generated or saved candidate sets.", TRAIN_EXAMPLES
    )
    add_cell(sub, own=True)
    sub.add_argument("--images", type=Path, metavar="DIR", help="instead of --dataset: a folder of your own images")
    sub.add_argument("--table", type=Path, metavar="FILE", help="instead of --dataset: a .csv, .parquet or .json")
    sub.add_argument("--features", metavar="A,B,X*", help="of --table: its features (default: all other columns)")
    sub.add_argument("--npz", type=Path, metavar="FILE", help="instead of --dataset: an .npz with x and candidates")
    sub.add_argument("--classes", metavar="A,B,C", help="of your own data: all classes (default: those that occur)")
    sub.add_argument("--skip-bad", action="store_true", help="of your own data: leave bad rows out and list them")
    sub.add_argument(
        "--stream", action="store_true", help="of --images: more than fit into memory, read while training"
    )
    sub.add_argument("--method", default="urrl", metavar="NAME", help="see `urrl methods` (default urrl)")
    sub.add_argument("--recipe", default="fast", metavar="NAME", help="fast (default) or paper; see `urrl recipes`")
    add_settings(sub)
    sub.add_argument(
        "--candidates",
        metavar="FILE",
        help="sets saved by `urrl generate`; of your own data a table with the columns item, candidates; "
        "with --table also the column that has them",
    )
    sub.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default runs/DATASET-METHOD-...)")
    sub.add_argument(
        "--resume", action="store_true", help="go on with the run in --out; a finished run is left as it is"
    )
    sub.add_argument("--tensorboard", action="store_true", help="write every epoch's figures for TensorBoard as well")
    add_machine(sub)

    sub = command("bench", _bench, "Train every cell of a grid, each in its own folder below --out.", BENCH_EXAMPLES)
    sub.add_argument("grid", metavar="GRID", help="a named grid or a TOML file")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the runs")
    sub.add_argument("--methods", metavar="A,B", help="all, or names (default: the paper's seven, or the file's)")
    sub.add_argument("--datasets", metavar="A,B", help="instead of the grid's")
    sub.add_argument("--seeds", type=int, metavar="N", help="seeds 0 to N-1 (default 3; paper:tsne 1; or the file's)")
    sub.add_argument("--recipe", metavar="NAME", help="fast (default) or paper")
    sub.add_argument("--subset", type=int, metavar="N", help="train on N items only")
    add_settings(sub)
    sub.add_argument("--data-dir", type=Path, metavar="D", help="where the data files are")
    sub.add_argument("--jobs", type=int, default=1, metavar="J", help="runs at a time (default 1)")
    sub.add_argument("--engine", default="local", metavar="NAME", help="local (default), slurm or ray")
    sub.add_argument("--retry-failed", action="store_true", help="try again what failed")
    sub.add_argument("--dry-run", action="store_true", help="only print the cells and what they would cost")
    add_machine(sub)

    sub = command("report", _report, "Tables beside the paper's and pictures of every run below a folder, on one page.")
    sub.add_argument("folder", type=Path, metavar="DIR", help="of `urrl bench`, or any folder with runs below it")
    sub.add_argument("--out", type=Path, metavar="FILE.html", help="the page (default DIR/report.html)")
    sub.add_argument("--data-dir", type=Path, metavar="D", help="where the data files are, for t-SNE")

    sub = command("generate", _generate, "Draw candidate sets for a data set and save them.")
    add_cell(sub)
    sub.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="where to save them")

    sub = command("predict", _predict, "Predict with a finished run; writes item, label and confidence as CSV.")
    sub.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a finished run")
    sub.add_argument("input", type=Path, metavar="INPUT", help="folder of images, table, .npz, or .npy: an array "
                     "(n, d) or, of uint8 images, (n, H, W) or (n, H, W, channels)")  # fmt: skip
    sub.add_argument("--out", type=Path, required=True, metavar="FILE.csv", help="where to write the predictions")
    sub.add_argument("--skip-bad", action="store_true", help="leave out what cannot be read and list it")
    add_machine(sub)

    sub = command("audit", _audit, "What a finished run found out about its candidate sets, as tables and a page.")
    sub.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a finished run")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for index.html and the tables")
    sub.add_argument("--format", default="csv", choices=("csv", "parquet", "json"), help="of the tables (default csv)")
    sub.add_argument("--data-dir", type=Path, metavar="D", help="where the data files are")
    add_machine(sub)

    sub = command("export", _export, "The network of a finished run, from items to probabilities, for other programs.")
    sub.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a finished run")
    sub.add_argument("--onnx", type=Path, metavar="FILE.onnx", help="for onnxruntime and others")
    sub.add_argument("--torch", type=Path, metavar="FILE.pt2", help="for torch.export.load")

    sub = command(
        "demo", _demo, "URRL on handwritten digits beside its lower and upper bound: no download, two minutes."
    )
    sub.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder (default runs/demo)")
    add_machine(sub)

    sub = command("show-augment", _show_augment, "A picture of the weak and strong views, to check by eye.")
    sub.add_argument("--dataset", required=True, metavar="NAME", help="see `urrl datasets`")
    sub.add_argument("--data-dir", type=Path, metavar="D", help="where the data files are")
    sub.add_argument("--seed", type=int, default=0, metavar="S")
    sub.add_argument("--out", type=Path, required=True, metavar="FILE.png", help="where to save it")

    sub = command("methods", _methods, "List the methods, or the options of one.")
    sub.add_argument("name", nargs="?", metavar="NAME")
    command("datasets", _datasets, "List the data sets.")
    command("recipes", _recipes, "List the recipes and what they set.")
    return top


def main() -> int:
    """The program: one line and exit code 2 for a user's mistake, never a traceback for it."""
    arguments = sys.argv[1:]
    interrupt.remember()
    keep_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the name of a file may be nothing that a terminal shows
    try:
        with _processes():
            parsed = parser().parse_args(arguments)
            if parsed.command is None:
                parser().print_help()
                return 0
            if parsed.command != "train" and "TORCHELASTIC_RUN_ID" in os.environ:
                raise UserError(f"torchrun starts `urrl train` alone, not `urrl {parsed.command}`")
            parsed.run(parsed)
            return 0
    except UserError as error:
        print(f"urrl: {error}", file=sys.stderr)
        return 2
    except Lost as error:
        print(f"urrl: {error}; the same command with --resume goes on from the last epoch", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone, as in `urrl recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"urrl: {printable(error.filename or 'file')}: {printable(error.strerror or error)}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        print(f"urrl: not enough memory ({one_line(error)[:200]})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = [a for a in arguments if a != "--resume"] + (["--resume"] if arguments[:1] == ["train"] else [])
        print(f"\nurrl: stopped; to go on: {shlex.join(['urrl', *again])}", file=sys.stderr)
        return 130


def _processes() -> contextlib.AbstractContextManager[None]:
    """One job of all processes, where torchrun started several."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return contextlib.nullcontext()
    from urrl.distributed import job

    return job()


def _torch(args: argparse.Namespace) -> None:
    """Settings of the machine, before any work."""
    import torch

    if args.threads is not None:
        cores = os.cpu_count() or 1
        if not 1 <= args.threads <= cores:  # torch dies of far too many threads, without a word
            raise UserError(f"--threads must be from 1 to {cores}, the cores of this machine, not {args.threads}")
        torch.set_num_threads(args.threads)


def _train(args: argparse.Namespace) -> None:
    from urrl import distributed
    from urrl.config import parse_settings
    from urrl.run import make_file_run, make_run, train
    from urrl.train import Diverged

    settings = parse_settings(args.settings)
    if args.epochs is not None:
        if "epochs" in settings:
            raise UserError("epochs is given twice: by --epochs and by --set")
        settings["epochs"] = args.epochs
    _torch(args)
    skipped: list[str] = []
    if source := _source(args):
        run, dataset, splits, sets, skipped = distributed.in_turn(
            lambda: make_file_run(source, args.method, settings, args.seed)
        )
        _list_skipped(skipped if distributed.rank() == 0 else [])
    else:
        run, dataset, splits, sets = distributed.in_turn(lambda: make_run(
            args.dataset, args.method, args.recipe, settings, eta=args.eta, mu=args.mu, convention=args.convention,
            seed=args.seed, split_kind=args.split, subset=args.subset, data_dir=args.data_dir,
            candidates=Path(args.candidates) if args.candidates else None,
        ))  # fmt: skip
    rates = [f"{rate}{value}" for rate, value in (("eta", run.eta), ("mu", run.mu)) if value is not None]
    fold = [run.split.replace(":", "")] if run.split.startswith("fold") else []
    name = "-".join([run.dataset, run.method, *rates, run.recipe, *fold, f"seed{run.seed}"])
    folder = args.out or Path("runs", name)
    show = _progress(args)
    if args.tensorboard and distributed.rank() == 0:
        from urrl.board import Board

        show = Board(folder / "tensorboard", args.quiet)
    try:
        resume = args.resume or distributed.restarts() > 0
        result = train(run, dataset, splits, sets, folder, resume, args.device, show)
    except Diverged as error:
        if distributed.rank() == 0:
            print(f"urrl: {error}; {folder} keeps what was good before", file=sys.stderr)
        sys.exit(1)
    if distributed.rank() == 0:
        _print_result(result, folder)


_TAKES = {  # where the data comes from, and which other options go with it
    "dataset": ("eta", "mu", "convention", "split", "subset", "data_dir", "candidates"),
    "images": ("candidates", "classes", "skip_bad", "stream"),
    "table": ("features", "candidates", "classes", "skip_bad"),
    "npz": ("candidates", "classes", "skip_bad"),
}


def _source(args: argparse.Namespace) -> dict[str, Any] | None:
    """A user's own files, as `load_source` takes them; None for a data set by name."""
    ways = [way for way in _TAKES if getattr(args, way) is not None]
    if len(ways) != 1:
        raise UserError("train takes one of --dataset, --images, --table and --npz (see urrl train --help)")
    (way,) = ways
    for name in dict.fromkeys(name for names in _TAKES.values() for name in names if name not in _TAKES[way]):
        if getattr(args, name) not in (None, False):
            raise UserError(f"--{name.replace('_', '-')} does not go with --{way}")
    if way == "dataset":
        return None
    if way != "npz" and args.candidates is None:
        what = "a table with the columns item and candidates" if way == "images" else "the column that has them"
        raise UserError(f"--{way} takes --candidates: {what}")
    if args.recipe != "fast":
        raise UserError(f"--recipe {args.recipe}: on your own data the settings are those of 'fast', after its size")
    source = {way: str(getattr(args, way).resolve()), **{name: getattr(args, name) for name in _TAKES[way]}}
    other = Path(args.candidates or "")  # a table of its own, or the name of a column
    if way == "images" or (other.suffix in (".csv", ".parquet", ".json") and other.is_file()):
        source["candidates"] = str(other.resolve())
    return source | {"classes": [name.strip() for name in args.classes.split(",")] if args.classes else None}


def _list_skipped(skipped: list[str]) -> None:
    for line in skipped:
        print(f"urrl: skipped: {line}", file=sys.stderr)


def _progress(args: argparse.Namespace, label: str = "") -> Any:
    from urrl.distributed import rank
    from urrl.progress import Progress

    return Progress(args.quiet or rank() > 0, label)


def _print_result(r: dict[str, Any], folder: Path) -> None:
    right = "" if r["corrected_precision"] is None else f", {r['corrected_precision']:.1%} of them right"
    bound = f" (the {r['bound']} bound)" if r["bound"] else ""
    best = f"epoch {r['best_epoch'] + 1} of {r['epochs']}"
    if r["val_accuracy"] is not None:
        best += f", validation {r['val_accuracy']:.2%}"
    if "val_covering" in r:
        best += f", held-out sets that hold the prediction {r['val_covering']:.2%}"
    noise = "".join(f", {rate} {r[rate]}" for rate in ("eta", "mu") if r[rate] is not None)
    print(f"{r['method']}{bound} on {r['dataset']}{noise}, seed {r['seed']}")
    test = "unknown" if r["test_accuracy"] is None else f"{r['test_accuracy']:.2%}"
    print(f"test accuracy     {test}   ({best})")
    print(f"candidate sets    {r['corrected']} labels added{right}")
    if r["label_accuracy"] is not None:
        before, after = r["true_in_set_before"], r["true_in_set_after"]
        print(f"                  they hold the true label: {before:.1%} before, {after:.1%} now")
        print(f"training labels   {r['label_accuracy']:.2%} right")
    print(
        f"cost              {r['seconds']:.0f} s, {r['train_flops']:.3g} FLOPs, {r['samples_per_second']:.0f} items/s"
    )
    print(f"run folder        {folder}   (curves.png, result.json)")


def _bench(args: argparse.Namespace) -> None:
    _torch(args)
    from urrl.bench import bench

    bench(args)


def _report(args: argparse.Namespace) -> None:
    from urrl.report import report

    report(args)


def _generate(args: argparse.Namespace) -> None:
    from urrl.data import default_split, load
    from urrl.evaluate import true_in_set
    from urrl.run import make_sets

    if args.out.exists():
        raise UserError(f"{args.out}: exists; nothing was changed")
    dataset = load(args.dataset, args.data_dir)
    kind = args.split or default_split(dataset)
    splits, sets = make_sets(dataset, kind, args.subset, args.eta, args.mu, args.convention, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    sets.save(args.out)
    print(f"{len(sets)} sets of {sets.n_classes} classes, mean size {sets.mean_size:.2f}, "
          f"true label missing in {1 - true_in_set(sets.mask, splits.train.truth):.2%}")  # fmt: skip
    print(f"{args.out}   sha256 {sets.sha256}")


def _predict(args: argparse.Namespace) -> None:
    _torch(args)
    from urrl.predict import predict_file

    skipped: list[str] = []
    n = predict_file(args.run_folder, args.input, args.out, args.device, skipped if args.skip_bad else None, args.quiet)
    _list_skipped(skipped)
    print(f"{n} predictions in {args.out}")


def _audit(args: argparse.Namespace) -> None:
    _torch(args)
    from urrl.audit import audit

    found = audit(args.run_folder, args.out, args.format, args.data_dir, args.device)
    print(f"{found['suspects']} of {found['items']} candidate sets probably miss the true label")
    if noise := found["noise"]:
        rates = {name: f"{r['value']:.1%} ({r['low']:.1%} to {r['high']:.1%})" for name, r in noise.items()}
        print(f"by the neighbours' sets alone {rates['missing']} miss it: mu is {rates['mu']} and eta {rates['eta']}, "
              "with 90 % intervals")  # fmt: skip
    again = "   (training takes it as --candidates; beside a --table, with --features)" if found["own"] else ""
    print(f"""look at           {args.out / "index.html"}
all, worst first  {args.out}/issues.{args.format}
cleaned labels    {args.out}/cleaned.{args.format}{again}""")


def _export(args: argparse.Namespace) -> None:
    from urrl.export import export_onnx, export_torch

    if (args.onnx is None) == (args.torch is None):
        raise UserError("export takes one of --onnx and --torch")
    out = args.onnx or args.torch
    if out.exists():
        raise UserError(f"{out}: exists; nothing was changed")
    (export_onnx if args.onnx else export_torch)(args.run_folder, out)
    print(out)


def _demo(args: argparse.Namespace) -> None:
    _torch(args)
    from urrl.demo import demo

    demo(args.out, args.device, args.quiet)


def _show_augment(args: argparse.Namespace) -> None:
    from urrl.data import load
    from urrl.data.augment import Policy, find_policy, save_picture

    if args.out.suffix != ".png":
        raise UserError(f"{args.out}: the picture is a .png")
    dataset = load(args.dataset, args.data_dir)
    policy = find_policy(dataset.augment)
    if not isinstance(policy, Policy):
        raise UserError(f"{args.dataset} has no images to show")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_picture(dataset.x[:8], policy, args.out, args.seed)
    print(args.out)


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").strip().partition("\n")[0]


def _methods(args: argparse.Namespace) -> None:
    from urrl.config import describe
    from urrl.methods import METHODS, method_name

    if args.name is None:
        for name, kind in METHODS.items():
            print(f"{name:<12} {_first_line(sys.modules[kind.__module__])}")
        return
    for option, type_name, default, doc in describe(METHODS[method_name(args.name)].Config):
        print(f"{option:<20} {type_name:<6} {default!s:<8} {doc}")


def _datasets(args: argparse.Namespace) -> None:
    from urrl.data import DATASETS

    for name, function in DATASETS.items():
        print(f"{name:<10} {_first_line(function)}")


def _recipes(args: argparse.Namespace) -> None:
    from urrl.config import RECIPES, Training, describe
    from urrl.data import DATASETS

    for name, recipe in RECIPES.items():
        print(f"{name:<6} {_first_line(recipe)}")
        for dataset in DATASETS:
            values = ", ".join(f"{k}={v}" for k, v in recipe(dataset, "urrl").items())
            if name == "fast" and dataset in ("lost", "msrcv2", "birdsong"):
                values = "net=mlp and a schedule after the number of items, as for your own data"
            print(f"       {dataset:<10} {values or 'all defaults'}")
    print("\noptions of the training (--set KEY=VALUE), with their defaults:")
    for option, kind, default, doc in describe(Training):
        print(f"{option:<14} {kind:<6} {default!s:<8} {doc}")


if __name__ == "__main__":
    sys.exit(main())
