"""The recipes of a run: certified first, then searched if they are within the error bound or a front is wanted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.device import Device
from zyfa.recipes import PRESETS, RECIPES
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store

from .certificate import Class, Open, certified, emulation, kernel
from .cli import Options


def class_of(key: AttentionKey) -> Class:
    """What the error of a recipe depends on, of a key."""
    return key.head_dim, key.head_dim_v, key.causal


@dataclass(frozen=True)
class RecipeAxis:
    """Which FP8 recipes are searched and which may win. worst: the certified error, absent where there is none."""

    recipes: tuple[str, ...]
    worst: dict[tuple[str, Class], float]
    max_error: float
    front: bool

    def searched(self, key: AttentionKey) -> tuple[str, ...]:
        """What the search may choose from for a key: in a front also what may not win."""
        certified = [recipe for recipe in self.recipes if (recipe, class_of(key)) in self.worst]
        return tuple(certified) if self.front else tuple(r for r in certified if self._within(key, r))

    def admits(self, key: AttentionKey, config: AttentionConfig) -> bool:
        """Whether a config may win: not FP8, or its recipe is one of those asked for and within the bound."""
        return config.recipe == "none" or (config.recipe in self.recipes and self._within(key, config.recipe))

    def fronted(self, key: AttentionKey, config: AttentionConfig) -> bool:
        """Whether a config may be the best of its recipe in a front: it is certified, whatever its error."""
        return self.front and (config.recipe, class_of(key)) in self.worst

    def _within(self, key: AttentionKey, recipe: str) -> bool:
        return self.worst.get((recipe, class_of(key)), float("inf")) <= self.max_error

    def without_any(self, keys: Sequence[AttentionKey]) -> str | None:
        """Says why a key has no recipe that may win, None if each has one."""
        for key in keys:
            if key.dtype == "fp8" and not any(self._within(key, recipe) for recipe in self.recipes):
                worst = {r: self.worst[r, class_of(key)] for r in self.recipes if (r, class_of(key)) in self.worst}
                errors = ", ".join(
                    f"{recipe} {error:.3f}" for recipe, error in sorted(worst.items(), key=lambda x: x[1])
                )
                return (
                    f"no recipe is within {self.max_error:g} at head dim {key.head_dim}; certified are {errors or None}"
                )
        return None


def recipe_axis(
    options: Options, device: Device, store: Store | None, toolchain: Toolchain, trust: str, gpus: Sequence[int],
    say: Callable[[str], None], ahead: Callable[[Open], None],
) -> RecipeAxis:  # fmt: skip
    """Certifies the recipes of a run in every class of its FP8 cells: on the first GPU, or by emulation without one.

    Where nothing is stored (method "compile") the errors that the recipes state have to do. ahead: is told what a GPU
    has to certify, before it does.
    """
    keys = [planned.key for planned in options.cells if planned.key.dtype == "fp8"]
    recipes = tuple(dict.fromkeys((*options.recipes, *(PRESETS.values() if options.pareto else ()))))
    classes = list(dict.fromkeys(map(class_of, keys)))
    if store is None:
        worst = {(recipe, at): RECIPES[recipe].worst_error for recipe in recipes for at in classes}
    else:
        if not gpus:  # small tensors: two threads on cores that also compile took 26 times as long as one
            torch.set_num_threads(1)
        attend = kernel(device.arch, torch.device("cuda", gpus[0])) if gpus else emulation(device.arch)
        worst = certified(store, toolchain, trust, classes, recipes, attend, say, ahead if gpus else lambda new: None)
    return RecipeAxis(recipes, worst, options.max_error.recipe, options.pareto)
