"""Contents of databases for hypothesis: few values, so that files agree, overlap and contradict each other."""

from collections import Counter

from databases import CONFIG, H200, TOOLS, a_key
from hypothesis import strategies as st

from zyfa.config import AttentionConfig
from zyfa.tuning_db.certificates import Licence, Stored
from zyfa.tuning_db.content import Content, Crown, Record

META = {"sku": H200.sku_key, "vendor": "nvidia", "arch": "sm90", "units": "132", "names": "{}"}
CONFIGS = [CONFIG.to_json(), AttentionConfig(128, 64, 8, 2).to_json()]
FP8_CONFIGS = [AttentionConfig(128, 64, 8, 2, recipe=recipe).to_json() for recipe in ("head", "tensor")]


@st.composite
def records(draw):
    trust, ok = draw(st.sampled_from(["measured", "predicted"])), draw(st.booleans())
    ms = draw(st.sampled_from([0.1, 0.5, 1 / 3])) if ok else None
    timed = ok and trust == "measured"
    fp8 = draw(st.booleans())
    config = draw(st.sampled_from(FP8_CONFIGS if fp8 else CONFIGS))
    return Record(
        a_key(draw(st.sampled_from([512, 700, 4096])), causal=draw(st.booleans()), dtype="fp8" if fp8 else "bf16"),
        TOOLS._replace(kernel_hash=draw(st.sampled_from(["k1", "k2"]))),
        config, recipe_of(config) if fp8 else "none", "ok" if ok else "gated", trust, int(draw(st.booleans())),
        ms, ms and 0.9 * ms, ms and 1.1 * ms, (100.5, 101.0) if timed else (), 0.002 if timed else None,
        "" if ok else "spills", f'{{"registers":{draw(st.integers(64, 66))}}}', draw(st.integers(1, 3)),
    )  # fmt: skip


def recipe_of(config):
    return AttentionConfig.from_json(config).recipe  # "head" and "tensor" are granularities too


@st.composite
def contents(draw):
    trials = Counter(draw(st.lists(records(), max_size=8)))
    crowns = [
        Crown(r, draw(st.sampled_from("ABC")), draw(st.integers(1, 2)), draw(st.none() | st.just(0.7)),
              draw(st.sampled_from(["2026-01-01T00:00:00.000Z", "2026-01-02T00:00:00.000Z"])))
        for r in trials if r.outcome == "ok" and draw(st.booleans())
    ]  # fmt: skip
    meta = META | ({"model_version": draw(st.sampled_from(["v1", "v2"]))} if draw(st.booleans()) else {})
    fp8 = [crown for crown in crowns if crown.record.key.dtype == "fp8"]
    licences = {
        Licence(c.seat.toolchain, c.seat.trust, recipe_of(c.record.config), 128, 128, c.record.key.causal) for c in fp8
    }
    errors = st.sampled_from(['{"normal":[0.03,0.04]}', '{"normal":[0.03],"sink":[0.5]}'])
    return Content(
        meta, trials, {crown.seat: crown for crown in crowns},
        {(crown.seat, recipe_of(crown.record.config)): crown for crown in fp8 if draw(st.booleans())},
        {licence: Stored(draw(errors), draw(st.integers(1, 3))) for licence in sorted(licences)},
    )  # fmt: skip
