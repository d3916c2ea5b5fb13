"""Answers made of the prompt's own words: repeating, summarising by the first sentence, listing, sorting, spelling."""

from random import Random

from demo.corpus.scene import Scene, ask, casual
from demo.corpus.words import ANIMALS, COLOURS, COMMON, FRUITS, PLACES, THINGS, VERBS_PAST, joined, made_up_word, people

_REPEAT = (
    "Repeat after me: {}",
    "Repeat: {}",
    "Say: {}",
    "Please say: {}",
    "Repeat this: {}",
    "Copy this text: {}",
    'Say "{}"',
    'Repeat "{}"',
    "Say exactly this: {}",
    "Say {}",
    "Repeat the following: {}",
    "Echo: {}",
)
_SUMMARISE = (
    "Summarise this text in one sentence: {}",
    "Summarize this text in one sentence: {}",
    "Summarise: {}",
    "Summarize: {}",
    "Give me a summary of this text: {}",
    "Sum up this text: {}",
    "{}\nSummarise this.",
    "What is this text about? {}",
)
_NAMES = (
    "List the names in this text: {}",
    "List the people in this sentence: {}",
    "Which people are named here? {}",
    "Who is in this sentence? {}",
    "Which names are in this text? {}",
    "{} List the names.",
)


def _phrase(rng: Random) -> str:
    size = rng.randint(1, 9)
    words = [made_up_word(rng) if rng.random() < 0.15 else rng.choice(COMMON) for _ in range(size)]
    if rng.random() < 0.5:
        words[0] = words[0].capitalize()
    return " ".join(words) + rng.choice(("", "", ".", "!"))


def repeat(rng: Random) -> Scene:
    phrase = _phrase(rng)
    if rng.random() < 0.1:
        phrase = " ".join(str(rng.randrange(100)) for _ in range(rng.randint(1, 6)))
    return ask("copying: repeat", rng.choice(_REPEAT).format(phrase), phrase)


def _sentence(rng: Random) -> str:
    a, b = people(rng, 2)
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    return rng.choice(
        (
            f"{a} {rng.choice(VERBS_PAST)} {b} at the {place}.",
            f"{a} bought a {rng.choice(COLOURS)} {thing} for {b}.",
            f"The new {place} opened in {rng.choice(('spring', 'summer', 'autumn', 'winter'))}.",
            f"The {rng.choice(ANIMALS)} was sleeping in the {place}.",
            f"{a} lost a {thing} near the {place}.",
            f"It was a {rng.choice(('cold', 'warm', 'rainy', 'sunny'))} day in the {place}.",
            f"{a} and {b} went to the {place}.",
            f"The {rng.choice(COLOURS)} {thing} was very cheap.",
        )
    )


def summary(rng: Random) -> Scene:
    text = [_sentence(rng) for _ in range(rng.randint(2, 4))]
    return ask("copying: summary", rng.choice(_SUMMARISE).format(" ".join(text)), text[0])


def names(rng: Random) -> Scene:
    who = people(rng, rng.randint(2, 4))
    listed, first, others = joined(who), who[0], joined(who[1:])
    place, thing = rng.choice(PLACES), rng.choice(THINGS)
    text = rng.choice(
        (
            f"{listed} went to the {place}.",
            f"{first} {rng.choice(VERBS_PAST)} {others} at the {place}.",
            f"The {thing} belongs to {listed}.",
            f"Yesterday {listed} bought a {rng.choice(COLOURS)} {thing}.",
        )
    )
    return ask("copying: list the names", rng.choice(_NAMES).format(text), ", ".join(who))


def sorting(rng: Random) -> Scene:
    form = rng.choice(("Sort these {}: {}", "Sort the {}: {}", "Put these {} in order: {}", "Please sort these {}: {}"))
    if rng.random() < 0.5:
        numbers = rng.sample(range(100), rng.randint(3, 5))
        question = form.format("numbers", ", ".join(map(str, numbers)))
        return ask("sorting: numbers", question, ", ".join(map(str, sorted(numbers))))
    words = rng.sample(rng.choice((FRUITS, COLOURS, ANIMALS[:16])), rng.randint(3, 4))
    return ask("sorting: words", form.format("words", ", ".join(words)), ", ".join(sorted(words)))


def spelling(rng: Random) -> Scene:
    word = rng.choice([*FRUITS, *COLOURS, *ANIMALS, *THINGS])
    form = rng.choice(("Spell the word {}.", "Spell {}.", "How do you spell {}?", 'Spell "{}".', "Can you spell {}?"))
    return ask("copying: spelling", casual(rng, form.format(word)), "-".join(word.upper()))


def word_of_list(rng: Random) -> Scene:
    words = rng.sample([*FRUITS, *COLOURS, *ANIMALS], rng.randint(3, 5))
    place, index = rng.choice((("first", 0), ("last", -1), ("second", 1)))
    form = rng.choice(
        ("What is the {} word in this list: {}?", "Which word is {} in this list: {}?", "Give me the {} word: {}")
    )
    return ask("copying: pick a word", form.format(place, ", ".join(words)), words[index])


def reversal(rng: Random) -> Scene:
    words = rng.sample([*FRUITS, *COLOURS, *ANIMALS], rng.randint(2, 5))
    question = rng.choice(("Reverse this list: {}", "Write this list backwards: {}")).format(", ".join(words))
    return ask("copying: reverse a list", question, ", ".join(reversed(words)))


def copying(rng: Random) -> Scene:
    makers = (repeat, repeat, repeat, summary, summary, names, sorting, sorting, spelling, word_of_list, reversal)
    return rng.choice(makers)(rng)
