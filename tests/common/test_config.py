from __future__ import annotations

from pathlib import Path

import pytest

from common.config import ConfigError, apply_overrides, load, parse_yaml, read_yaml, validate
from common.spec import ClusterSpec

GOOD = {"sites": [{"name": "a", "gpus": 4}, {"name": "b", "gpus": 2}], "links": []}
LINK = {"between": ["a", "b"], "bandwidth_gbps": 1, "latency_us": 10}


def cluster(**changes: object) -> ClusterSpec:
    return validate(ClusterSpec, {**GOOD, "links": [LINK], **changes}, "cluster.yaml")


def test_a_valid_cluster_is_read_with_its_defaults() -> None:
    spec = cluster()
    assert spec.gpus == 6
    assert spec.site("a").gpus_per_node == 8
    assert spec.links[0].between == ("a", "b")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sites": [{"name": "a", "gpu": 4}]}, "sites.0.gpu: unknown key; did you mean 'gpus'"),
        ({"sites": [{"name": "a", "gpus": -1}]}, "found -1"),
        ({"sites": []}, "sites"),
        ({"sites": [{"name": "a", "gpus": 1}, {"name": "a", "gpus": 1}], "links": []}, "'a' is used twice"),
        ({"links": []}, "no path from 'a' to 'b'"),
        ({"links": [{**LINK, "between": ["a", "c"]}]}, "no site 'c'; sites are a, b"),
        ({"links": [{**LINK, "between": ["a", "a"]}]}, "two different sites"),
        ({"links": [LINK, LINK]}, "joined twice"),
        ({"links": [{**LINK, "bandwidth_gbps": 0}]}, "links.0.bandwidth_gbps"),
        ({"links": [{**LINK, "latency_us": float("nan")}]}, "links.0.latency_us"),
        ({"links": [{"between": ["a", "b"], "latency_us": 1}]}, "links.0.bandwidth_gbps: required, but missing"),
    ],
)
def test_bad_clusters_are_refused_with_the_key_and_the_way_out(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.yaml: ") as error:
        cluster(**changes)
    assert expected in str(error.value)


def test_overrides_reach_into_lists_and_make_missing_mappings() -> None:
    data = apply_overrides(GOOD, ["sites.0.gpus=9", "extra.deep.key=[1, 2]", "name=x"])
    assert data["sites"][0]["gpus"] == 9
    assert data["extra"] == {"deep": {"key": [1, 2]}}
    assert GOOD["sites"][0]["gpus"] == 4  # the input is untouched


@pytest.mark.parametrize("override", ["sites", "=3", "sites.7.gpus=1", "sites.0.gpus.x=1", "name=[1,"])
def test_bad_overrides_name_themselves(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        apply_overrides(GOOD, [override])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &x [1]\nb: *x", "aliases are not allowed"),
        ("a: 1\na: 2", "given twice"),
        ("- 1", "found list"),
        ("a: [1", "not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("", "found NoneType"),
    ],
)
def test_unsafe_or_broken_yaml_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_yaml(text, "file.yaml")
    assert expected in str(error.value)


def test_a_missing_file_names_the_near_one(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("name: x")
    with pytest.raises(ConfigError, match=r"did you mean .*demo\.yaml"):
        read_yaml(tmp_path / "dmo.yaml")


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "big.yaml"
    file.write_text("a: " + "x" * (5 * 2**20))
    with pytest.raises(ConfigError, match="larger than 4 MiB"):
        load(file, ClusterSpec)
