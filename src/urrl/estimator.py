"""The scikit-learn front door: `URRLClassifier().fit(X, candidates)`, and the same for every method."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from urrl.candidates import CandidateSets
from urrl.data import Dataset, Splits
from urrl.data.augment import AnyPolicy, Policy, find_policy, normalise
from urrl.data.own import as_items, from_arrays
from urrl.errors import UserError
from urrl.evaluate import infer, set_scores
from urrl.functional import renormalise_on
from urrl.labels import row_blocks
from urrl.likelihood import estimate_mu, log_given
from urrl.methods import Method
from urrl.methods.urrl import URRL
from urrl.nets import Network, Out
from urrl.noise import noise_by_vote
from urrl.parse import parse_candidates
from urrl.progress import Progress
from urrl.run import build_method, learn, make_own_run, pick_device
from urrl.train import Diverged

if TYPE_CHECKING:
    import pandas as pd


class PartialLabelClassifier(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClassifierMixin, BaseEstimator):
    """Learn from candidate labels with any of the methods that `urrl methods` lists.

    X: features (n, d), a frame, uint8 images (n, H, W) or (n, H, W, channels), a list of images or of paths of image
    files. y: candidate sets in any form that `urrl.parse.parse_candidates` takes; ordinary labels are sets of one, an
    empty set is an item without a label.

    Settings that are None are chosen from the number and the shape of the items.

    method                name of the method
    classes               names of all classes; None: those that occur in y
    epochs, batch_size, lr, width    of the training
    augment               views of the items: an `urrl.data.augment.Policy` or `Features`; None: chosen from X
    validation_fraction   share of the rows held out, whose candidate sets choose the best epoch. 0: the last epoch,
                          which is as good (benchmarks/selection.py), and all rows are learned from
    options               any other option of the training or of the method (`urrl methods NAME`), by name
    random_state          seed of everything random
    n_jobs                CPU threads; None: as torch is set, -1: all cores
    device                "auto", "cpu", "cuda", ...
    verbose               show the progress

    After fit: `classes_`; for each row of X `label_distributions_` (n, C), `candidates_` (n, C) bool, with the labels
    that were added, `transduction_`, its likeliest label; `added_` (n, C), the epoch in which a label was added or -1;
    `noise_`, how unreliable the sets are, by the votes of neighbours; `history_`, a record of each epoch;
    `best_epoch_`; `network_`.
    """

    def __init__(
        self, method: str = "proden", *, classes: Sequence[Any] | None = None, epochs: int | None = None,
        batch_size: int | None = None, lr: float | None = None, width: int | None = None,
        augment: AnyPolicy | None = None, validation_fraction: float = 0.0, options: dict[str, Any] | None = None,
        random_state: Any = None, n_jobs: int | None = None, device: str = "auto", verbose: int = 0,
    ):  # fmt: skip
        self.method = method
        self.classes = classes
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.width = width
        self.augment = augment
        self.validation_fraction = validation_fraction
        self.options = options
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> PartialLabelClassifier:
        x = self._items(X, fitting=True)
        sets, names = self._candidates(y, self.classes)
        if len(names) < 2:
            raise UserError(f"training takes at least 2 classes; the candidates have 1 class, {names[0]!r}")
        if not (isinstance(self.validation_fraction, (int, float, np.number)) and 0 <= self.validation_fraction < 1):
            raise UserError(f"validation_fraction is a share from 0 and below 1, not {self.validation_fraction!r}")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        dataset = from_arrays(x, sets.mask, names, augment=self.augment)
        run, splits, given = make_own_run(dataset, self.method, self._settings(), seed, self.validation_fraction)
        policy = find_policy(dataset.augment)
        if isinstance(policy, Policy) and x.dim() == 2:
            raise UserError("augment: the policy is for images, the items are features")
        with self._threads(), _random_state_of_torch_kept():
            method = build_method(run, splits.train.x, policy, given, self.device)
            try:
                show = Progress(not self.verbose)
                state = learn(method, splits, given, policy, run.training, seed, None, False, show)
            except Diverged as error:
                raise UserError(f"{error}; a smaller lr may help") from None
            f = infer(method.net, splits.val.x, policy).logits.cpu().softmax(1) if len(splits.val) else torch.empty(0)
            noise = noise_by_vote(x if x.dim() > 2 else normalise(x, policy), sets.mask)
            l, S, added = _about_labels(method, dataset, splits, f, state.best_epoch)
        self.classes_ = np.asarray(names)
        self.label_distributions_, self.candidates_, self.added_ = l.numpy(), S.numpy(), added.numpy()
        self.transduction_ = self.classes_[self.label_distributions_.argmax(1)]
        self.noise_ = noise
        self.history_, self.best_epoch_ = state.history, state.best_epoch
        self.network_: Network = method.net.cpu()
        self.policy_ = policy
        self.run_ = run
        self.shape_ = tuple(x.shape[1:])
        self._n_features_out = run.training.embed_dim * run.training.members
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """(n, C): the probability of each of `classes_`."""
        return self._infer(X).logits.double().softmax(1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        label = self._infer(X).logits.argmax(1).numpy()
        return self.classes_[label]

    def transform(self, X: Any) -> np.ndarray:
        """(n, d): the unit-norm embedding of each item, in the precision of its features."""
        q = self._infer(X).q.numpy()
        return q.astype(X.dtype) if getattr(X, "dtype", None) == np.float64 else q

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The share of the rows whose prediction is among the candidates: for ordinary labels, the accuracy."""
        f, S = self._scored(X, y)
        covered = S[np.arange(len(S)), f.argmax(1)].numpy()
        return float(np.average(covered, weights=sample_weight))

    def label_issues(self, X: Any, items: Sequence[Any] | None = None) -> pd.DataFrame:
        """A frame of the items that the classifier was fitted on, given again as X, worst first: which candidate sets
        probably miss the true label, and which it is. `items` are their names. See `urrl.audit.label_issues`."""
        from urrl.audit import label_issues

        out = self._infer(X)
        if len(out.logits) != len(self.candidates_):
            raise UserError(f"{len(out.logits)} items, but the classifier was fitted on {len(self.candidates_)}")
        l, S, added = (torch.from_numpy(a) for a in (self.label_distributions_, self.candidates_, self.added_))
        return label_issues(out, l, S & (added < 0), self.classes_.tolist(), items, added)

    def _scored(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:
        """(predictions, candidate sets), (n, C) each; a candidate that the classifier does not know is no column."""
        f = self._infer(X).logits.softmax(1)
        sets, names = self._candidates(y, self.classes)
        unnamed = [name for name in self.classes_.tolist() if name not in names]
        if unnamed and getattr(y, "ndim", 1) == 1 and not isinstance(y, CandidateSets):
            sets, names = self._candidates(y, [*names, *unnamed])  # who has no label may be one of those
        column = {name: c for c, name in enumerate(names)}
        places = [column.get(name, -1) for name in self.classes_.tolist()]
        mask = torch.nn.functional.pad(sets.mask, (0, 1))[:, places]
        if len(mask) != len(f):
            raise UserError(f"{len(f)} items, but {len(mask)} candidate sets")
        return f, mask

    def _settings(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("epochs", "batch_size", "lr", "width")}
        own = {name: value for name, value in own.items() if value is not None}
        options = dict(self.options or {})
        for name in own.keys() & options.keys():
            raise UserError(f"{name} is given twice, as a parameter and in options")
        chosen = own | options
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in chosen.items()}

    def _items(self, X: Any, fitting: bool) -> Tensor:
        if type(X).__name__ in ("Column", "Series", "ChunkedArray") or getattr(X, "ndim", 2) == 1:
            X = list(X)  # images or paths
        images = getattr(X, "ndim", 2) > 2 or (isinstance(X, (list, tuple)) and len(X) and not np.isscalar(X[0])
                                               and np.ndim(X[0]) != 1) or _are_paths(X)  # fmt: skip
        if not images:
            try:
                X = validate_data(
                    self, X, reset=fitting, dtype=(np.float64, np.float32), ensure_all_finite=False,
                    ensure_min_samples=2 if fitting else 1,
                )  # fmt: skip
            except OverflowError as error:
                raise UserError(f"features are numbers ({error})") from None
        x = as_items(X, None if fitting or len(self.shape_) == 1 else (self.shape_[2], self.shape_[1]))
        if images and fitting:
            self.n_features_in_ = int(np.prod(x.shape[1:]))
        if not fitting and x.dim() == 4 and (x.shape[1], self.shape_[0]) == (1, 3):
            x = x.expand(-1, 3, -1, -1).contiguous()  # a grey image among colour ones
        if not fitting and tuple(x.shape[1:]) != self.shape_:
            raise UserError(f"the classifier takes items of {self.shape_}, these are {tuple(x.shape[1:])}")
        return x

    def _candidates(self, y: Any, classes: Sequence[Any] | None) -> tuple[CandidateSets, list[Any]]:
        if y is None:
            raise UserError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        if isinstance(y, np.ndarray) and y.ndim == 2 and y.shape[1] == 1 and y.dtype != bool:
            y = column_or_1d(y, warn=True)
        if getattr(getattr(y, "dtype", None), "kind", "") == "f" and y.ndim == 1:
            check_classification_targets(np.asarray(y)[~np.isnan(np.asarray(y))])
        return parse_candidates(y, classes)

    def _infer(self, X: Any) -> Out:
        check_is_fitted(self)
        x = self._items(X, fitting=False)
        with self._threads():
            net = self.network_.to(pick_device(self.device))
            training = self.run_.training
            out = infer(net, x, self.policy_, training.flip_test, training.move_test)
            self.network_.cpu()
        return Out(*(t.cpu() for t in out))

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        if self.n_jobs is not None:
            if not isinstance(self.n_jobs, (int, np.integer)):
                raise UserError(f"n_jobs is a whole number, not {self.n_jobs!r}")
            cores = os.cpu_count() or 1  # torch dies of far too many threads, without a word
            torch.set_num_threads(min(int(self.n_jobs), cores) if self.n_jobs > 0 else cores)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class URRLClassifier(PartialLabelClassifier):
    """URRL: learns from candidate labels that may all be wrong, and says which were.

    phi   a label outside a set enters it where its share of the vote exceeds this; "auto": where it is likelier than
          all others together

    Everything else as in PartialLabelClassifier.
    """

    def __init__(
        self, *, phi: float | str = "auto", classes: Sequence[Any] | None = None, epochs: int | None = None,
        batch_size: int | None = None, lr: float | None = None, width: int | None = None,
        augment: AnyPolicy | None = None, validation_fraction: float = 0.0, options: dict[str, Any] | None = None,
        random_state: Any = None, n_jobs: int | None = None, device: str = "auto", verbose: int = 0,
    ):  # fmt: skip
        super().__init__(
            "urrl", classes=classes, epochs=epochs, batch_size=batch_size, lr=lr, width=width, augment=augment,
            validation_fraction=validation_fraction, options=options, random_state=random_state, n_jobs=n_jobs,
            device=device, verbose=verbose,
        )  # fmt: skip
        self.phi = phi

    def _settings(self) -> dict[str, Any]:
        if self.phi != "auto" and not isinstance(self.phi, (int, float, np.number)):
            raise UserError(f"phi is 'auto' or a number, not {self.phi!r}")
        if "phi" in (self.options or {}):
            raise UserError("phi is a parameter of its own, not one of options")
        return ({"adapt": True} if self.phi == "auto" else {"phi": float(self.phi)}) | super()._settings()


def candidate_score(estimator: PartialLabelClassifier, X: Any, y: Any) -> float:
    """A scorer for `GridSearchCV(..., scoring=candidate_score)` and `cross_val_score` where y are candidate sets: their
    log-likelihood under the predictions, which allows for sets that miss the true label."""
    return set_scores(*estimator._scored(X, y))["likelihood"]


def _about_labels(method: Method, dataset: Dataset, splits: Splits, f: Tensor, epoch: int
                  ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(l, S, epoch of an addition or -1) of every row. The held-out rows get what the network says of them, f, and how
    likely their sets are under it, by the rule by which URRL corrects the others."""
    assert dataset.S is not None
    S, l = dataset.S.clone(), torch.zeros(dataset.S.shape)
    added = torch.full(S.shape, -1, dtype=torch.int16)
    for rows in row_blocks(method.S):
        items = splits.train.index[rows.cpu()]
        S[items], l[items] = method.S[rows].cpu(), method.l[rows].cpu()
        if hasattr(method, "added"):
            added[items] = method.added[rows].cpu()
    held = splits.val.index
    if len(held) and isinstance(method, URRL):
        mu = float(method.mu) if method.mu >= 0 else estimate_mu(f, S[held])
        f = (f.clamp_min(1e-8).log() + log_given(S[held], mu)).softmax(1)
        best, label = f.max(1)
        enters = (best > (0.5 if method.config.adapt else method.config.phi)) & ~S[held, label]
        S[held[enters], label[enters]] = True
        added[held[enters], label[enters]] = epoch
    if len(held):
        l[held] = renormalise_on(S[held], f)
    return l, S, added


def _are_paths(X: Any) -> bool:
    return isinstance(X, (list, tuple)) and len(X) > 0 and isinstance(X[0], (str, os.PathLike))


@contextlib.contextmanager
def _random_state_of_torch_kept() -> Iterator[None]:
    """Training seeds torch's own generators; the caller's draws go on as if it had not."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
