"""What a model says about knobs, against times whose causes are known."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from dashboard_support import add_trials, hostile_database, sample_database

from schedsearch.dashboard import importance
from schedsearch.dashboard.answers import Answers, UnknownPathError
from schedsearch.dashboard.effects import Searched, knob_effects
from schedsearch.dashboard.importance import Importances, model_importance
from schedsearch.dashboard.views.importance import ModelImportance
from schedsearch.dashboard.views.task import Knobs

NAMES = ("size", "flag", "kind", "idle")
VALUES = ((16, 32, 64, 128), (False, True), ("a", "b", "c"), (0, 1, 2, 3, 4, 5, 6, 7))


def searched(logs: str, trials: int = 192, noise: float = 0.01, failing: str = "False") -> Searched:
    """All combinations of `VALUES`: log(time) and whether it fails are Python expressions of the codes."""
    grid = np.stack(np.meshgrid(*(range(len(values)) for values in VALUES), indexing="ij"), -1).reshape(-1, len(VALUES))
    rng = np.random.default_rng(0)
    codes = grid[rng.permutation(len(grid))][:trials].astype(np.int32)
    columns = dict(zip(NAMES, codes.T.astype(float)))
    times = np.exp(eval(logs, {"np": np}, columns) + noise * rng.standard_normal(len(codes)))
    failed = np.broadcast_to(eval(failing, {"np": np}, columns), times.shape)
    times[failed] = np.nan
    outcomes = np.where(failed, "compile_error", "ok")
    return Searched(Knobs("t", NAMES, VALUES), codes, times, outcomes, np.arange(len(codes)), [""] * len(codes))


def losses(found: ModelImportance) -> dict[str, float]:
    assert not found.note
    return {each.knob: each.loss for each in found.knobs}


class TestModel:
    def test_the_knob_that_makes_the_times_is_the_first(self) -> None:
        found = model_importance(searched("size + 0.1 * flag"))
        assert found.knobs[0].knob == "size"
        loss = losses(found)
        assert loss["size"] > 0.8 > 0.1 > loss["flag"] >= loss["idle"]
        assert found.trials == 192 and found.correlation is not None and found.correlation > 0.9

    def test_knobs_that_matter_only_together_count(self) -> None:
        trials = searched("(flag == (size >= 2)) * 1.0")
        alone = {effect.knob: effect.importance for effect in knob_effects(trials)}
        assert max(alone["size"] or 0, alone["flag"] or 0) < 0.02
        loss = losses(model_importance(trials))
        assert min(loss["size"], loss["flag"]) > 0.5 > 0.1 > max(loss["idle"], loss["kind"])

    def test_texts_count_by_their_value(self) -> None:
        loss = losses(model_importance(searched("np.where(kind == 1, 1.0, 0.0) + 0.2 * flag")))
        assert max(loss, key=loss.__getitem__) == "kind"

    def test_failures_teach_the_model_but_do_not_judge_it(self) -> None:
        found = model_importance(searched("size + 0.1 * flag", failing="kind == 2"))
        assert found.trials == 128
        assert max(losses(found), key=losses(found).__getitem__) == "size"

    def test_a_knob_that_some_trials_lack(self) -> None:
        trials = searched("size * 1.0")
        trials.codes[::3, 3] = -1
        assert losses(model_importance(trials))["size"] > 0.8

    def test_it_is_the_same_whenever_it_is_asked(self) -> None:
        assert model_importance(searched("size + flag")) == model_importance(searched("size + flag"))

    @pytest.mark.parametrize(
        ("logs", "trials", "noise", "note"),
        [
            ("size", 29, 0.01, "29 valid trials are too few for a model; it needs 30"),
            ("0 * size", 192, 1.0, "a model cannot predict the times of these trials, so it says nothing about knobs"),
            ("0 * size", 192, 0.0, "the times are too much alike for a model to learn from"),
        ],
    )
    def test_when_there_is_nothing_to_say(self, logs: str, trials: int, noise: float, note: str) -> None:
        found = model_importance(searched(logs, trials, noise))
        assert (found.note, found.knobs) == (note, ())

    def test_many_trials_are_a_sample(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importance, "MOST_TRIALS", 60)
        found = model_importance(searched("size * 1.0"))
        assert found.trials == 60 and losses(found)["size"] > 0.5


class TestKept:
    def test_until_a_task_has_grown_by_a_quarter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trained: list[int] = []
        monkeypatch.setattr(importance, "model_importance", lambda each: trained.append(1))
        kept = Importances()
        for database, trials, count in (("a", 100, 1), ("a", 125, 1), ("a", 126, 2), ("a", 100, 3), ("b", 100, 4)):
            if kept.known("k", database, trials) is None:
                kept.train("k", database, trials, [searched("size")])
            assert len(trained) == count, (database, trials)

    def test_without_xgboost_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        view = Importances().train("k", "a", 100, [searched("size")])
        assert (view.note, view.models) == ("xgboost, which trains the model, is not installed", ())


class TestAnswer:
    def test_of_a_task(self, tmp_path: Path) -> None:
        answers = Answers([str(sample_database(tmp_path / "a.db", trials=400))])
        answers.refresh()
        (key, *_) = answers.task_keys()
        view = answers.get(f"importance/{key}")
        assert {model["template"]: model["knobs"][0]["knob"] for model in view["models"]} == {
            "conv2d_wgmma": "tile", "conv2d_mma": "tile",
        }  # fmt: skip
        assert all(model["correlation"] > 0.8 for model in view["models"])
        with pytest.raises(UnknownPathError, match="there is no task"):
            answers.get("importance/0.tnone")
        answers.close()

    def test_new_trials_do_not_train_it_again_at_once(self, tmp_path: Path) -> None:
        answers = Answers([str(sample_database(tmp_path / "a.db", trials=20, live=True))])
        answers.refresh()
        key = answers.task_keys()[-1]
        before = answers.body(f"importance/{key}")
        add_trials(tmp_path / "a.db", 2)
        answers.refresh()
        assert answers.body(f"importance/{key}") == before
        add_trials(tmp_path / "a.db", 5, seed=3)
        answers.refresh()
        assert answers.body(f"importance/{key}") != before
        answers.close()

    def test_of_foreign_text(self, tmp_path: Path) -> None:
        answers = Answers([str(hostile_database(tmp_path / "h.db"))])
        answers.refresh()
        ((model,),) = [answers.get(f"importance/{key}")["models"] for key in answers.task_keys()]
        assert "too few" in model["note"]
        answers.close()
