"""The accuracy that is promised, on the published measurements; files that cannot be used; both commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from common.config import ConfigError
from scale_across.cli import app
from scale_across.measurements import read_cases
from scale_across.validate import overall_bias, regrets, row_error, score

DATA = Path(__file__).resolve().parents[1] / "data"
FLOORS = {
    "sc21_table1": 0.04,
    "korthikanti_table5": 0.03,
    "llama3_table4": 0.05,
    "dgxc_2025": 0.05,
    "torchtitan_2024": 0.05,
    "vtrain_multi_node": 0.06,
    "vtrain_single_node": 0.09,
}


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def test_published_measurements_are_predicted_within_the_floors() -> None:
    cases = [case for name in ("measured_training", "vtrain_multi_node", "vtrain_single_node")
             for case in read_cases(DATA / f"{name}.csv")]  # fmt: skip
    errors = [row_error(case) for case in cases]
    scores = {line.source: line for line in score(errors)}
    assert {
        source: line.mean_abs_error for source, line in scores.items() if line.mean_abs_error > FLOORS[source]
    } == {}
    assert set(scores) == set(FLOORS)
    assert abs(scores["sc21_table1"].worst) <= 0.08
    assert scores["vtrain_multi_node"].median_abs_error <= 0.045
    assert abs(overall_bias(list(scores.values()))) <= 0.02
    assert scores["vtrain_single_node"].cells == 31
    multi = [line.regret for line in regrets(errors, cases) if line.model.startswith("vtrain_multi")]
    assert len(multi) == 4
    assert max(multi) <= 0.14


def test_what_a_publication_leaves_open_is_chosen_and_said() -> None:
    rows = [row_error(case) for case in read_cases(DATA / "measured_training.csv")]
    assert {row.source for row in rows if row.note} == {"llama3_table4"}
    assert all("interleave not published, took" in row.note for row in rows if row.note)


HEADER = (DATA / "measured_training.csv").read_text().splitlines()[0]
ROW = "mine,tiny,h100-sxm,8,16,24,2048,8192,16,16,50304,2048,64,{microbatch},2,1,2,4,1,1,1f1b,none,iteration_s,{value},"


def test_a_run_without_preset_is_built_from_its_columns(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(f"{HEADER}\n" + ROW.format(microbatch="", value="1.0") + "\n")
    (case,) = read_cases(file)
    assert len(case.model.layers) == 24
    assert case.free == ("microbatch",)
    assert {plan.microbatch for plan in case.plans} == {1, 2, 4, 8}
    file.write_text(f"{HEADER}\nmine,tiny,h100-sxm,8,16,24,2048,8192,16,,,2048,64,1,,,,,,,1f1b,,iteration_s,1.0,\n")
    (open_case,) = read_cases(file)
    assert open_case.free == ("tp", "pp", "dp", "recompute")
    assert all(plan.gpus == 16 for plan in open_case.plans)
    assert len({plan.recompute for plan in open_case.plans}) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "is neither that of measured_training.csv"),
        (f"{HEADER}\n", "no rows below the header"),
        (f"{HEADER}\nonly,three,cells\n", "line 2 has not the 25 columns"),
        (f"{HEADER}\n" + ROW.format(microbatch="1", value="-3"), "line 2: value is '-3'; it must be a number above 0"),
        (f"{HEADER}\n" + ROW.format(microbatch="x", value="1"), "line 2: microbatch is 'x'; it must be a number"),
        (f"{HEADER}\n" + ROW.format(microbatch="3", value="1"), r"line 2: .*microbatch 3.* do not divide the 16 GPUs"),
        (f"{HEADER}\n" + ROW.format(microbatch="1", value="1").replace("h100-sxm", "h1"), "accelerator 'h1' is unk"),
        (f"{HEADER}\n" + ROW.format(microbatch="1", value="nan"), "value is 'nan'"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_error(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_cases(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cases(tmp_path / "none.csv")


def test_validate_prints_a_list_of_scores() -> None:
    done = run("validate", str(DATA / "vtrain_multi_node.csv"), "--json")
    (line,) = json.loads(done.output)
    assert line["source"] == "vtrain_multi_node"
    assert line["rows"] == 55
    assert {"mean_abs_error", "median_abs_error", "bias", "worst"} <= set(line)
    rows = json.loads(run("validate", str(DATA / "vtrain_multi_node.csv"), "--rows", "--json").output)
    assert len(rows) == 55
    assert rows[0]["predicted"] == pytest.approx(rows[0]["measured"], rel=0.1)


def test_predict_prints_a_breakdown_or_refuses_what_does_not_fit() -> None:
    plan = ["--tp", "8", "--pp", "16", "--chunks", "8", "--dp", "64", "--global-batch", "2048"]
    fits = run("predict", "llama-3.1-405b", "llama3-24k", *plan, "--recompute", "full", "--json")
    assert fits.exit_code == 0
    values = json.loads(fits.output)
    assert values["fits"]
    assert values["bound_s"] < values["total_s"]
    assert values["mfu"] < values["hfu"]
    refused = run("predict", "llama-3.1-405b", "llama3-24k", *plan)
    assert isinstance(refused.exception, ConfigError)
    assert "but a GPU has 80 GiB" in str(refused.exception)
    unknown = run("predict", "llama-9", "llama3-24k")
    assert "no such preset or file" in str(unknown.exception)
    assert "tp is 3" in str(run("predict", "llama-3.1-8b", "llama3-24k", "--tp", "3").exception)
