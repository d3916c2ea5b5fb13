"""The mathematics of speculative decoding. Knows tokens only: no tensors, drafters or sessions."""

from collections.abc import Sequence


def count_accepted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """How many of the K drafts are accepted, given the K + 1 tokens chosen after them: 0 to K.

    A token is a function of its logits, parameters, seed and position (`engine.sampling`), so plain decoding gives
    one answer t[0], t[1], ... Row i of the step has seen the text and drafts[:i], and chosen[i] is the token after it:

        drafts[:i] == t[:i]  implies  chosen[i] == t[i]

    By induction from i = 0, where drafts[:0] is empty: while drafts[i] == chosen[i], drafts[:i + 1] is t[:i + 1], so
    row i + 1 holds too. At the first i where they differ, chosen[i] is still t[i], but later rows have seen a wrong
    token. So with n accepted the step gives chosen[:n + 1]: n drafts, and one token that corrects drafts[n] or, if
    n = K, follows them all. The answer equals that of plain decoding, whatever the drafter proposes; a drafter that
    samples from its own logits with the same noise just drafts right more often.

    ValueError if there is not exactly one token more than drafts.
    """
    if len(chosen) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} chosen tokens, not {len(chosen)}")
    return next(
        (i for i, (draft, token) in enumerate(zip(drafts, chosen, strict=False)) if draft != token), len(drafts)
    )
