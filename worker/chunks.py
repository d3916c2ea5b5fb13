"""How many prompt tokens go beside answers in one step: so many that the answers hardly stutter. Pure."""

STRETCH = 1.7  # times what a step of answers alone takes
FEWEST, FIRST = 16, 32  # tokens
MOST_GROWTH, MOST_SHRINKING = 1.2, 1.5  # from step to step: one that was short or long by chance says little
KEPT = 0.8  # of the average, when a step is added to it


class ChunkSizer:
    """Learns from measured steps: each takes the time of its answers alone, and some more for each prompt token."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._quiet_s = 0.0  # average of steps without prompt tokens; 0: none was measured
        self._token_s = 0.0  # what a prompt token adds; 0: none was measured

    @property
    def size(self) -> int:
        """Prompt tokens beside answers in the next step."""
        fitting = (STRETCH - 1) * self._quiet_s / self._token_s if self._token_s else FIRST
        return min(max(int(fitting), FEWEST), self._most)

    def note_step(self, num_answers: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many answers' tokens and prompt tokens took so long."""
        if not num_answers or seconds <= 0:
            return
        if not num_prompt_tokens:
            self._quiet_s = KEPT * self._quiet_s + (1 - KEPT) * seconds if self._quiet_s else seconds
        elif self._quiet_s and (seconds > STRETCH * self._quiet_s or num_prompt_tokens >= self.size):
            before = self._token_s or (STRETCH - 1) * self._quiet_s / FIRST
            found = (seconds - self._quiet_s) / num_prompt_tokens
            self._token_s = min(max(found, before / MOST_GROWTH), before * MOST_SHRINKING)
