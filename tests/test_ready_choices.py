"""What is ready for a signature and for how long: no stale choice, a bounded number of signatures, no tensor kept."""

import dataclasses
import gc
import threading
import weakref

import pytest
import torch
from databases import a_key, make_db
from fake_gpu import addresses, qkv

import zyfa
from zyfa import lookup, ready
from zyfa.config import AttentionConfig

A, B = AttentionConfig(64, 64, 4, 3), AttentionConfig(64, 32, 4, 1)
pytestmark = [
    pytest.mark.usefixtures("nothing_shipped"),
    pytest.mark.filterwarnings("ignore:.*no tuned config:RuntimeWarning"),
]


# choices that change


def user_db(config, seqlen=96, **more):
    key = a_key(seqlen, head_dim=32, nheads=4, nheads_k=2, causal=False)
    return make_db(lookup.user_db_path(zyfa.device.device_of_sku("h200")), (key, {"config": config} | more))


def test_another_database_counts_after_reset_and_not_before(gpu):
    user_db(A)
    zyfa.attention(*qkv())
    lookup.user_db_path(zyfa.device.device_of_sku("h200")).unlink()
    user_db(B)
    zyfa.attention(*qkv())
    assert gpu.last().config == A
    lookup.reset()
    for _ in range(2):
        zyfa.attention(*qkv())
        assert gpu.last().config == B
    assert gpu.recorded == 2 and len(ready._ready) == 1


def test_zyfa_tuning_db_counts_after_reset(gpu, monkeypatch, tmp_path):
    user_db(A)
    zyfa.attention(*qkv())
    key = a_key(96, head_dim=32, nheads=4, nheads_k=2, causal=False)
    monkeypatch.setenv("ZYFA_TUNING_DB", str(make_db(tmp_path / "other.sqlite", (key, {"config": B}))))
    zyfa.attention(*qkv())
    assert gpu.last().config == A
    lookup.reset()
    zyfa.attention(*qkv())
    assert gpu.last().config == B


def test_a_withdrawn_config_is_used_by_no_signature_of_its_cell(gpu):
    user_db(A)
    zyfa.attention(*qkv())
    assert gpu.last().config == A
    gpu.fail = RuntimeError("ptxas died")
    with pytest.warns(RuntimeWarning, match="the plain default runs instead"):
        zyfa.attention(*qkv(seqlen=90))  # the same cell
    for seqlen in (90, 96, 90, 96):
        zyfa.attention(*qkv(seqlen=seqlen))
        assert gpu.last().config not in (A, None)
    zyfa.attention(*qkv(), config=A)
    assert gpu.last().config == A, "the caller's own config is the caller's"


def test_a_failing_config_of_the_caller_fails_every_time(gpu):
    zyfa.attention(*qkv())
    for _ in range(2):
        gpu.fail = RuntimeError("ptxas died")
        with pytest.raises(RuntimeError, match="ptxas died"):
            zyfa.attention(*qkv(), config=A)


def test_equal_configs_of_each_call_share_the_record(gpu):
    for number in range(3):
        zyfa.attention(*qkv(number), config=dataclasses.replace(A))
    assert gpu.recorded == 1 and gpu.last().config == A


def test_log_prints_once_for_each_cell(gpu, monkeypatch, capfd):
    monkeypatch.setenv("ZYFA_LOG", "config")
    for seqlen in (96, 96, 90, 96):
        zyfa.attention(*qkv(seqlen=seqlen))
    assert capfd.readouterr().err.count("zyfa: device") == 1


# what is kept


def test_signatures_are_bounded(gpu, monkeypatch):
    monkeypatch.setattr(ready, "MAX_READY", 4)
    for seqlen in (*range(64, 74), 64):
        q, k, v = qkv(seqlen=seqlen)
        for _ in range(2):
            zyfa.attention(q, k, v)
            assert gpu.last().args[:3] == addresses(q, k, v) and len(ready._ready) <= 4


def test_no_tensor_of_a_call_is_kept(gpu):
    tensors = [*qkv(), torch.zeros(4)]
    refs = [weakref.ref(x) for x in tensors]
    zyfa.attention(*tensors[:3], sink=tensors[3], precision="fp8")
    gpu.launches.clear()
    del tensors
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4 and ready._ready


class Marked(torch.Tensor):
    """A subclass, whose layout may not be all that there is to it."""


@pytest.mark.parametrize("name", ["q", "sink"])
def test_subclasses_are_checked_every_time(gpu, name):
    q, k, v = qkv()
    given = {"q": q, "k": k, "v": v, "sink": torch.zeros(4)}
    zyfa.attention(**given)
    known = len(ready._ready)
    zyfa.attention(**given | {name: given[name].as_subclass(Marked)})
    assert len(ready._ready) == known and gpu.recorded == 1


def test_threads_launch_what_they_ask_for(gpu):
    """Every launch has the tensors of one call, whoever runs beside it."""
    calls = [qkv(seed) for seed in range(4)]
    zyfa.attention(*calls[0], precision="fp8")
    wanted = {addresses(*call) for call in calls}

    def work(call):
        for _ in range(50):
            zyfa.attention(*call, precision="fp8")

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    quantised = [la.args[:3] for la in gpu.launches if la.kernel == "quantize"]
    assert len(quantised) == 201 and {*quantised} == wanted and gpu.recorded == 1
