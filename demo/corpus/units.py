"""Unit conversion by small closed tables, forwards (`3 metres`) and back (`300 centimetres`), and temperatures."""

from random import Random

from demo.corpus.scene import Scene, ask, casual

# (big unit, small unit, small units in one big, largest number of big units asked)
TABLES = (
    ("kilometre", "metre", 1000, 30),
    ("metre", "centimetre", 100, 30),
    ("centimetre", "millimetre", 10, 30),
    ("kilogram", "gram", 1000, 30),
    ("tonne", "kilogram", 1000, 30),
    ("litre", "millilitre", 1000, 30),
    ("hour", "minute", 60, 12),
    ("minute", "second", 60, 12),
    ("day", "hour", 24, 10),
    ("week", "day", 7, 12),
    ("year", "month", 12, 12),
    ("foot", "inch", 12, 12),
    ("yard", "foot", 3, 12),
    ("pound", "ounce", 16, 10),
    ("dollar", "cent", 100, 30),
    ("euro", "cent", 100, 30),
    ("century", "year", 100, 20),
    ("decade", "year", 10, 20),
)
_PLURALS = {"foot": "feet", "inch": "inches", "century": "centuries"}
_FORMS = (
    "How many {want} are in {n} {have}?",
    "How many {want} are in {n} {have}?",
    "How many {want} are there in {n} {have}?",
    "How many {want} in {n} {have}?",
    "Convert {n} {have} to {want}.",
    "Convert {n} {have} into {want}.",
    "What is {n} {have} in {want}?",
    "{n} {have} in {want}",
    "How many {want} is {n} {have}?",
    "Please convert {n} {have} to {want}.",
)


def _amount(n: int, unit: str) -> str:
    return f"{n} {unit if n == 1 else _PLURALS.get(unit, unit + 's')}"


def _american(text: str) -> str:
    return text.replace("metre", "meter").replace("litre", "liter")


def conversion(rng: Random) -> Scene:
    big, small, factor, most = rng.choice(TABLES)
    n = rng.randint(1, most)
    have, want = (n, big), (n * factor, small)
    if rng.random() < 0.35:
        have, want = want, have
    plural = _PLURALS.get(want[1], want[1] + "s")
    count, unit = _amount(*have).split(" ")
    question = rng.choice(_FORMS).format(
        want=plural, n="a" if count == "1" and rng.random() < 0.2 else count, have=unit
    )
    answer = f"{_amount(*have)} {'is' if have[0] == 1 else 'are'} {_amount(*want)}."
    if rng.random() < 0.25:
        question, answer = _american(question), _american(answer)
    return ask("units: tables", casual(rng, question), answer)


def temperature(rng: Random) -> Scene:
    celsius = rng.randrange(0, 101, 5)
    fahrenheit = celsius * 9 // 5 + 32
    if rng.random() < 0.6:
        have, want = (celsius, "Celsius"), (fahrenheit, "Fahrenheit")
    else:
        have, want = (fahrenheit, "Fahrenheit"), (celsius, "Celsius")
    form = rng.choice(
        (
            "Convert {n} degrees {have} to {want}.",
            "What is {n} degrees {have} in {want}?",
            "How much is {n} degrees {have} in {want}?",
            "{n} {have} in {want}",
        )
    )
    question = form.format(n=have[0], have=have[1], want=want[1])
    return ask(
        "units: temperature", casual(rng, question), f"{have[0]} degrees {have[1]} are {want[0]} degrees {want[1]}."
    )


def units(rng: Random) -> Scene:
    return temperature(rng) if rng.random() < 0.15 else conversion(rng)
