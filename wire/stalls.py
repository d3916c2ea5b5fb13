"""When an engine's step counts as stuck rather than slow: one rule for gateway and workers. Pure."""

PREDICTED_TIMES = 5  # how often a step may take what was predicted


def find_stuck(step_age_s: float, predicted_s: float, stall_s: float) -> str | None:
    """Why an engine is stuck, to follow a worker's name; None while it may just be slow.

    `predicted_s`: of the step it is in; 0 if nothing was measured yet. `stall_s`: the setting, the least that counts.
    """
    if step_age_s <= max(stall_s, PREDICTED_TIMES * predicted_s):
        return None
    predicted = f", predicted to take {predicted_s:.2f} s" if predicted_s else ""
    return f"has been in one engine step for {step_age_s:.0f} s{predicted} (--stall-s {stall_s:g})"
