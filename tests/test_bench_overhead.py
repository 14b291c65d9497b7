"""zyfa-bench overhead: what is timed is what users call, bursts never wait, and the page holds every number."""

import re
import xml.etree.ElementTree

import pytest
from click.testing import CliRunner
from fake_gpu import FakeGpu

from zyfa import lookup
from zyfa.reference import attention_ref, relative_error
from zyfa.tuner import bench_cli, bench_overhead
from zyfa.tuner.bench_overhead import Overhead, measure_overhead, parts, peer_calls, public_calls
from zyfa.tuner.bench_report import bars, write_report
from zyfa.tuner.inputs import Shape, normal

ROWS = [Overhead("zyfa bf16", 10.0, 9.0, 12.0, 2.0), Overhead("part: <launch>", 4.0, 3.0, 5.0, None)]


@pytest.fixture(scope="module")
def qkv():
    return normal(Shape(1, 96, 4, 2, 32), 0)


def test_bursts_count_calls_and_wait_between(qkv):
    events = []
    calls = {"a": lambda: events.append("a"), "b": lambda: events.append("b")}
    results = measure_overhead(calls, number=5, loops=3, wait=lambda: events.append("|"))
    assert events.count("a") == events.count("b") == 5 * (1 + 3) and events.count("|") == 2 * (1 + 3)
    assert re.fullmatch(r"(\|(a{5}|b{5}))*", "".join(events))
    assert [r.name for r in results] == ["a", "b"] and all(0 < r.us_lo <= r.us <= r.us_hi for r in results)
    assert all(r.ratio is None for r in results), "nothing to compare with"


def test_ratios_are_sdpas_time_over_each_call_but_not_over_parts():
    calls = {bench_overhead.SDPA: lambda: None, "slow": lambda: sum(range(10000)), "part: slow": lambda: None}
    sdpa, slow, part = measure_overhead(calls, number=20, loops=3, wait=lambda: None)
    assert sdpa.ratio == 1 and slow.ratio == pytest.approx(sdpa.us / slow.us) and slow.ratio < 0.5
    assert part.ratio is None


def test_public_calls_compute_the_same(qkv):
    calls, ref = public_calls(qkv), attention_ref(*qkv, causal=True)
    for name, call in calls.items():
        out = call().transpose(1, 2) if name == bench_overhead.SDPA else call()
        error = relative_error(out, ref)
        assert 0.01 < error < 0.15 if "fp8" in name else error < 0.01, name


def test_a_missing_peer_is_named(qkv, monkeypatch):
    missing = ModuleNotFoundError("no fa3 here")
    monkeypatch.setattr(bench_overhead, "PEERS", [bench_overhead.PEERS[0]._replace(name="fa3", make=_raising(missing))])
    calls, skipped = peer_calls(qkv)
    assert list(calls) == ["triton kernel of 5 arguments"] and skipped == {"fa3 bf16": "no fa3 here"}


def _raising(error):
    def make(*_):
        raise error

    return make


@pytest.mark.filterwarnings("ignore:.*no tuned config:RuntimeWarning")
def test_parts_are_those_of_a_replayed_call(qkv, monkeypatch):
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr("zyfa.device.current_device", lambda index: bench_overhead_device())
    made = parts(qkv)
    assert list(made) == ["part: check", "part: choose", "part: output", "part: launch"]
    assert made["part: check"]().key.causal and made["part: choose"]().config.recipe == "none"
    before = len(gpu.launches)
    made["part: launch"]()
    assert len(gpu.launches) == before + 1 and gpu.last().args[:3] == tuple(x.data_ptr() for x in qkv)
    lookup.reset()


def bench_overhead_device():
    from zyfa.device import device_of_sku

    return device_of_sku("h200")


def test_the_page_holds_every_row_and_escapes(tmp_path):
    path = tmp_path / "x.html"
    write_report(path, "Host <time>", {"gpu": "A&B"}, [row._asdict() for row in ROWS], "us")
    text = path.read_text()
    assert "Host &lt;time&gt;" in text and "gpu: A&amp;B" in text and "<launch>" not in text
    assert text.count("<rect") == 2 and "<td class='n'>10</td>" in text and "src=" not in text


def test_bars_are_as_long_as_the_values():
    drawing = xml.etree.ElementTree.fromstring(bars([row._asdict() for row in ROWS], "us"))
    widths = [float(bar.get("width")) for bar in drawing.iter("rect")]
    assert widths == pytest.approx([600 * 10 / 12, 600 * 4 / 12], abs=0.1)


@pytest.mark.gpu
def test_overhead_on_a_gpu(tmp_path):
    page, data = tmp_path / "x.html", tmp_path / "x.json"
    args = ["overhead", "--loops", "3", "--number", "10", "--json", str(data), "--report", str(page)]
    result = CliRunner().invoke(bench_cli.cli, args)
    assert result.exit_code == 0, result.output
    assert "part: launch" in result.output and page.stat().st_size > 1000 and "prepared fp8" in data.read_text()
