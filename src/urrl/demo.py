"""The first thing a newcomer runs: URRL between its lower and its upper bound, on data that needs no download."""

from __future__ import annotations

from pathlib import Path

from urrl.progress import Progress
from urrl.run import make_run, train


def demo(out: Path, device: str = "auto", quiet: bool = False) -> None:
    results = {}
    for method in ("urrl", "average", "supervised"):
        run, dataset, splits, sets = make_run("digits", method, "fast", {}, eta=0.3, mu=0.3, seed=0)
        results[method] = train(run, dataset, splits, sets, out / method, True, device, Progress(quiet, method))
    r = results["urrl"]
    named = f"{r['label_accuracy']:.1%}"
    right = round(r["corrected"] * (r["corrected_precision"] or 0))
    print(f"""
Handwritten digits: {r["n_train"]} training images of 10 classes, each with a set of candidate labels,
{r["mean_set_size"]:.1f} on average. In {1 - r["true_in_set_before"]:.0%} of the sets the true label is missing.

  trained on                                     test accuracy
  the sets as they are (average over the set)    {results["average"]["test_accuracy"]:12.2%}
  the sets, with URRL                            {r["test_accuracy"]:12.2%}
  clean labels (what nobody has)                 {results["supervised"]["test_accuracy"]:12.2%}

URRL corrected {r["corrected"]} candidate sets, {right} of them rightly. Sets that hold the true label:
{r["true_in_set_before"]:.1%} before, {r["true_in_set_after"]:.1%} now. It names the right label for {named}
of the training images.
Training took {sum(result["seconds"] for result in results.values()):.0f} s in all.

Look at {out / "urrl" / "curves.png"}; everything about the run is in {out / "urrl"}.""")
