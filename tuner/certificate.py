"""Certifies recipes: their errors on inputs that are hard for low precision, before any of their configs may win.

The inputs are the synthetic families with two seeds and, where the head dim matches, the activations of real models.
Beside them stands the worst error that the recipe states (recipes.py), which is that of all samples at either head dim:
what lost a layer there may lose one here, and a wheel, which has no samples, is no less strict than a checkout.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait

import torch

from zyfa.archs import default_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.limits import broken_limit
from zyfa.recipes import RECIPES
from zyfa.reference import attention_ref, emulate, relative_error
from zyfa.tuning_db.certificates import Certificate, add_certificate, certificates
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store

from .inputs import CHECKOUT_ACTIVATIONS, FAMILIES, QKV, Shape, load_activations

SEQLEN = 500  # no multiple of a tile or of the rows that share a scale
SEEDS = (0, 1)
STATED = "worst stated"  # the name of the recipe's own worst_error in a certificate
GUARD_ROWS = 128  # of NaN before and after Q, K and V in memory

Attend = Callable[[QKV, str, bool], torch.Tensor]  # (inputs, recipe, causal) -> output
Class = tuple[int, int, bool]  # head_dim, head_dim_v, causal
Open = Mapping[Class, Sequence[str]]  # recipes by class


def certificate_inputs(head_dim: int, head_dim_v: int) -> Iterator[tuple[str, QKV]]:
    """(name, q, k, v) of every input; a name comes once for each seed."""
    for family, make in FAMILIES.items():
        for seed in SEEDS:
            q, k, v = make(Shape(1, SEQLEN, 4, 2, max(head_dim, head_dim_v)), seed)
            yield family, (q[..., :head_dim], k[..., :head_dim], v[..., :head_dim_v])
    for path in sorted(CHECKOUT_ACTIVATIONS.glob("*.npz")):
        qkv = load_activations(path)
        if (qkv[0].shape[3], qkv[2].shape[3]) == (head_dim, head_dim_v):
            yield path.stem, qkv


class CannotRunError(RuntimeError):
    """The device cannot run a recipe with its default tile at this head dim; says why."""


def certify(recipes: Sequence[str], at: Class, attend: Attend) -> tuple[list[Certificate], dict[str, str]]:
    """The certificates of the recipes that give a finite output everywhere, and of each other recipe why not."""
    errors: dict[str, dict[str, tuple[float, ...]]] = {recipe: {} for recipe in recipes}
    bad: dict[str, str] = {}
    for name, qkv in certificate_inputs(*at[:2]):
        ref = attention_ref(*qkv, causal=at[2])
        for recipe in errors.keys() - bad.keys():
            try:
                error = relative_error(attend(qkv, recipe, at[2]), ref)
            except CannotRunError as failure:
                bad[recipe] = f"recipe {recipe} at head dim {at[0]}: {failure}"
                continue
            errors[recipe][name] = (*errors[recipe].get(name, ()), error)
            if not math.isfinite(error):
                bad[recipe] = f"recipe {recipe} at head dim {at[0]}: output not finite on {name}"
    good = [recipe for recipe in errors if recipe not in bad]
    return [Certificate(r, *at, errors[r] | {STATED: (RECIPES[r].worst_error,)}) for r in good], bad


def emulation(arch: str) -> Attend:
    """The recipe in exact arithmetic on the CPU."""
    return lambda qkv, recipe, causal: emulate(*qkv, recipe, arch=arch, causal=causal)


def guarded(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x (batch 1, seqlen, heads, width) on the device between rows of NaN: reading past its ends shows."""
    whole = torch.full((1, x.shape[1] + 2 * GUARD_ROWS, *x.shape[2:]), math.nan, dtype=x.dtype, device=device)
    whole[:, GUARD_ROWS:-GUARD_ROWS] = x.to(device)
    return whole[:, GUARD_ROWS:-GUARD_ROWS]


def kernel(arch: str, device: torch.device) -> Attend:
    """The kernel with its default tile, between guard rows, into an output full of NaN."""
    from triton.runtime.errors import OutOfResources

    from zyfa.kernels.launch import attention_forward

    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one

    def attend(qkv: QKV, recipe: str, causal: bool) -> torch.Tensor:
        q, k, v = (guarded(x, device) for x in qkv)
        _, seqlen, nheads, head_dim = q.shape
        key = AttentionKey("fp8", head_dim, v.shape[3], nheads, k.shape[2], 1, seqlen, seqlen, causal)
        config = default_config(arch, key, recipe)
        if limit := broken_limit(config, key, arch):
            raise CannotRunError(limit)
        out = torch.full((1, seqlen, nheads, v.shape[3]), math.nan, dtype=q.dtype, device=device)
        try:
            return attention_forward(q, k, v, config=config, arch=arch, causal=causal, out=out)[0].cpu()
        except OutOfResources as failure:
            raise CannotRunError(str(failure).splitlines()[0]) from failure

    return attend


def kernel_key(at: Class) -> AttentionKey:
    """A call like those that certify a class; their builds serve any number of heads and rows."""
    return AttentionKey("fp8", *at[:2], 4, 2, 1, SEQLEN, SEQLEN, at[2])


def build_ahead(compile: Callable[[AttentionKey, AttentionConfig], Future], arch: str, new: Open) -> None:
    """Compiles side by side what kernel() would compile one after the other, and waits; failures show there."""
    calls = [(kernel_key(at), recipe) for at, recipes in new.items() for recipe in recipes]
    configs = [(key, default_config(arch, key, recipe)) for key, recipe in calls]
    wait([compile(key, config) for key, config in configs if broken_limit(config, key, arch) is None])


def certified(
    store: Store, toolchain: Toolchain, trust: str, classes: Iterable[Class], recipes: Sequence[str], attend: Attend,
    say: Callable[[str], None], ahead: Callable[[Open], None] = lambda new: None,
) -> dict[tuple[str, Class], float]:  # fmt: skip
    """The worst error of each recipe in each class: from the store where it is known, else found now and stored.

    A recipe that fails has no entry; `say` is told why. ahead: is told what is not known before any of it is found.
    """
    known = {(c.recipe, (c.head_dim, c.head_dim_v, c.causal)): c.worst for c in certificates(store, toolchain, trust)}
    missing = {at: [recipe for recipe in recipes if (recipe, at) not in known] for at in dict.fromkeys(classes)}
    new = {at: names for at, names in missing.items() if names}
    if new:
        ahead(new)
    for at, names in new.items():
        found, bad = certify(names, at, attend)
        for certificate in found:
            add_certificate(store, toolchain, trust, certificate)
            known[certificate.recipe, at] = certificate.worst
        for reason in bad.values():
            say(f"not certified: {reason}")
    return known
