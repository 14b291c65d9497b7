"""Which precision each layer of a model can bear: measured on captured Q, K and V, cheapest within an error budget.

The budget bounds every layer by itself, not their mean: what one layer loses no other gives back. In one public
1.5B model per-tensor FP8 has a median error of 9 % and 65 % in layer 0, and perplexity goes from 3.3 to 7.6; a mean of
12 % would not show why. Bounding each layer also makes the plan optimal layer by layer.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .config import AttentionKey
from .device import Device, current_device
from .lookup import choose, choose_recipe
from .recipes import PRESETS
from .reference import attention_ref, emulate, relative_error

# Time relative to bf16 where no database has both: kernels only, one H200, 8192 tokens, head dim 128, causal (503, 563,
# 687 and 776 TFLOPS). fast and balanced run the same kernel. Database rows include quantisation and replace these.
RELATIVE_TIME = {
    "bf16": 1.0, "fp8:accurate": 0.89, "fp8:balanced": 0.73, "fp8:fast": 0.73, "fp8:per_tensor": 0.65,
}  # fmt: skip
HELD_EVERY = 4  # every fourth query row is held out: it checks the choice and has no part in it

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PlannedLayer:
    """One layer of a plan. error: of the chosen precision, relative to float64; held_error: on the held-out rows.

    errors: of every precision that was considered. time: predicted, relative to bf16. work: its share of the model's.
    """

    precision: str
    error: float
    held_error: float
    time: float
    work: float
    errors: dict[str, float]


@dataclass(frozen=True)
class PrecisionPlan:
    """The `precision` argument of zyfa.attention for each layer: plan["layer name"]."""

    budget: float
    causal: bool
    layers: dict[str, PlannedLayer]

    def __getitem__(self, name: str) -> str:
        return self.layers[name].precision

    @property
    def time(self) -> float:
        """Predicted time of all layers, relative to bf16 in all of them."""
        return sum(layer.time * layer.work for layer in self.layers.values())

    @property
    def beyond_budget(self) -> dict[str, float]:
        """The layers whose held-out rows have more error than the budget, with that error. Empty is good."""
        return {name: x.held_error for name, x in self.layers.items() if not x.held_error <= self.budget}

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "PrecisionPlan":
        """Inverse of save; raises ValueError naming the file when it holds no plan."""
        try:
            values = json.loads(Path(path).read_text())
            layers = {name: PlannedLayer(**layer) for name, layer in values.pop("layers").items()}
            plan = cls(layers=layers, **values)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a precision plan: {error}") from error
        if unknown := {layer.precision for layer in layers.values()} - RELATIVE_TIME.keys():
            raise ValueError(
                f"{path}: precision {sorted(unknown)[0]!r} is unknown; known are {', '.join(RELATIVE_TIME)}"
            )
        return plan


def plan_precision(
    captured_layers: Mapping[str, QKV], budget: float, *, causal: bool = True, device: Device | None = None
) -> PrecisionPlan:
    """For each layer the precision of least predicted time whose output has at most `budget` relative error.

    captured_layers: name -> (q, k, v) as zyfa.attention takes them, bf16 or fp16, at least 2 * HELD_EVERY query rows.
    budget: ||out - exact|| / ||exact|| of each layer, exact in float64 (0.03 to 0.05 is usual). "bf16" is taken where
    no recipe is good enough. Among equal times the smaller error wins. device: whose database gives the times; that of
    the tensors by default, RELATIVE_TIME for CPU tensors. Raises ValueError naming the argument and the layer.
    """
    if not 0 < budget < 1:
        raise ValueError(f"budget is {budget}; accepted is a relative error between 0 and 1")
    if not captured_layers:
        raise ValueError("captured_layers is empty; give {name: (q, k, v)}")
    work = {name: _work(name, qkv) for name, qkv in captured_layers.items()}
    layers = {
        name: _planned(qkv, budget, causal, device, work[name] / sum(work.values()))
        for name, qkv in captured_layers.items()
    }
    return PrecisionPlan(budget, causal, layers)


def layer_errors(plan: PrecisionPlan, layers: Mapping[str, QKV]) -> dict[str, float]:
    """The relative error of each planned layer on other captures of it: the same model on another text."""
    if missing := layers.keys() - plan.layers.keys():
        raise ValueError(f"layers has {sorted(missing)[0]!r}, which the plan lacks; it has {', '.join(plan.layers)}")
    found = {}
    for name, qkv in layers.items():
        _work(name, qkv)
        found[name] = relative_error(_output(qkv, plan[name], plan.causal), attention_ref(*qkv, causal=plan.causal))
    return found


def _work(name: str, qkv: QKV) -> float:
    """FLOPs of a layer, up to a factor; checks its tensors."""
    q, k, v = qkv
    dims = [x.dim() for x in qkv]
    if dims != [4, 4, 4] or {x.dtype for x in qkv} not in ({torch.bfloat16}, {torch.float16}):
        got = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in qkv)
        raise ValueError(f"captured_layers[{name!r}] is {got}; accepted are bf16 or fp16 (batch, seqlen, heads, dim)")
    if q.shape[1] < 2 * HELD_EVERY:
        raise ValueError(f"captured_layers[{name!r}] has {q.shape[1]} query rows; at least {2 * HELD_EVERY} are needed")
    return float(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1] * (q.shape[3] + v.shape[3]))


def _planned(qkv: QKV, budget: float, causal: bool, device: Device | None, work: float) -> PlannedLayer:
    ref = attention_ref(*qkv, causal=causal)
    held = torch.arange(ref.shape[1], device=ref.device) % HELD_EVERY == HELD_EVERY - 1
    errors, held_errors = {}, {}
    for precision in RELATIVE_TIME:
        out = _output(qkv, precision, causal)
        errors[precision] = relative_error(out[:, ~held], ref[:, ~held])
        held_errors[precision] = relative_error(out[:, held], ref[:, held])
    times = relative_times(qkv, causal, device)
    good = [precision for precision, error in errors.items() if error <= budget or precision == "bf16"]
    best = min(good, key=lambda precision: (times[precision], errors[precision]))
    return PlannedLayer(best, errors[best], held_errors[best], times[best], work, errors)


def _output(qkv: QKV, precision: str, causal: bool) -> torch.Tensor:
    if precision == "bf16":
        return attention_ref(*qkv, causal=causal, dtype=torch.float32, p_dtype=qkv[0].dtype)
    return emulate(*qkv, PRESETS[precision.removeprefix("fp8:")], causal=causal)


def relative_times(qkv: QKV, causal: bool, device: Device | None = None) -> dict[str, float]:
    """Time of every precision relative to bf16: from database rows of one cell and trust, else RELATIVE_TIME."""
    q, k, v = qkv
    if device is None and q.is_cuda:
        device = current_device(q.device.index)
    if device is None:
        return RELATIVE_TIME
    dtype = "fp16" if q.dtype == torch.float16 else "bf16"
    batch, seqlen_q, nheads, head_dim = q.shape
    key = AttentionKey(dtype, head_dim, v.shape[3], nheads, k.shape[2], batch, seqlen_q, k.shape[1], causal)
    plain, times = choose(key, device).row, dict(RELATIVE_TIME)
    for name, recipe in PRESETS.items() if plain else ():
        row = choose_recipe(key._replace(dtype="fp8"), device, recipe).row
        comparable = plain and row and row.config.recipe == recipe and row.cell[1:] == plain.cell[1:]
        if plain and row and comparable and row.trust == plain.trust:
            times[f"fp8:{name}"] = row.ms / plain.ms
    return times
