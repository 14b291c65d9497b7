"""The machine code of every feature at the default configs: what it costs in registers."""

import itertools

import pytest
import torch

from zyfa.archs import ARCHS, default_config
from zyfa.config import AttentionKey
from zyfa.kernels.launch import attention_forward
from zyfa.tuner.compile import _captured_stderr, _target
from zyfa.tuner.facts import facts_of
from zyfa.tuner.gate import gate

FEATURES = {
    "window": {"window_size": (1023, 0)},
    "softcap": {"softcap": 30.0},
    "sink": {"sink": torch.empty(32, device="meta")},
    "varlen": {name: torch.empty(3, dtype=torch.int32, device="meta") for name in ("cu_seqlens_q", "cu_seqlens_k")}
    | {"max_seqlen_q": 4096, "max_seqlen_k": 4096},
}


def key_of(dtype: str, head_dim: int) -> AttentionKey:
    return AttentionKey(dtype, head_dim, head_dim, 32, 8, 1, 4096, 4096, True)


def compiled(arch: str, key: AttentionKey, features):
    """Facts of the causal kernel with some features at the default config of a key; lse included."""
    same = {name: value for feature in features for name, value in FEATURES[feature].items()}
    batch = () if "cu_seqlens_q" in same else (1,)
    q, k, v = (torch.empty((*batch, 4096, n, key.head_dim), dtype=torch.bfloat16, device="meta") for n in (32, 8, 8))
    same |= {"causal": True, "return_lse": True, "compile_only": True}
    with _target(arch), _captured_stderr():
        return facts_of(attention_forward(q, k, v, config=default_config(arch, key), arch=arch, **same), arch)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype, head_dim", list(itertools.product(("bf16", "fp8"), (64, 128, 256))))
def test_a_feature_spills_nothing_on_gfx950(dtype, head_dim, feature):
    """Of 512 registers the most, 323, go to BF16 at head dim 256 with a window or softcap."""
    facts = compiled("gfx950", key_of(dtype, head_dim), [feature])
    assert (facts.spills, facts.scratch_bytes) == (0, 0)
    assert facts.registers <= 352 and facts.lds_bytes <= ARCHS["gfx950"].lds_bytes


@pytest.mark.parametrize(
    "dtype, head_dim, stack", [("bf16", 128, 0), ("bf16", 256, 112), ("fp8", 128, 8), ("fp8", 256, 0)]
)
def test_all_features_at_once_pass_the_gate_of_hopper(dtype, head_dim, stack):
    """With everything on, ptxas (255 registers a thread) keeps 112 bytes of BF16 at head dim 256 on the stack.

    That is within what the gate takes (the fastest plain tiles have up to 208). Next best: eight warps, 32 bytes.
    """
    key = key_of(dtype, head_dim)
    facts = compiled("sm90", key, FEATURES)
    assert gate(facts, key, default_config("sm90", key), "sm90") is None
    assert facts.scratch_bytes <= stack
