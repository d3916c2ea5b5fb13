"""How rows choose experts, as data. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid"]
# float32: scores and weights. rounded: float32, then weights rounded to the model's dtype. logits: the logits' dtype.
Precision = Literal["float32", "rounded", "logits"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How each row chooses top_k of num_experts, and their weights; `route` applies it. ValueError if inconsistent."""

    num_experts: int  # E
    top_k: int  # k
    scoring: Scoring = "softmax"
    scores_all: bool = True  # False: experts are chosen by logits, and the chosen logits scored (gpt-oss)
    # The choice is within the top_groups of num_groups groups. A group's score is the sum of its group_peaks best.
    num_groups: int = 1
    top_groups: int = 1
    group_peaks: int = 1
    renormalise: bool = False  # divide the weights by their sum + epsilon
    epsilon: float = 0.0
    scale: float = 1.0  # routed_scaling_factor
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.top_k} of {self.num_experts} experts cannot be chosen")
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"{self.num_experts} experts, of which {self.top_groups} in {self.num_groups} groups")
        group_size = self.num_experts // self.num_groups
        if self.top_k > self.top_groups * group_size or self.group_peaks > group_size:
            raise ValueError(f"groups of {group_size} experts are too small for {self}")
