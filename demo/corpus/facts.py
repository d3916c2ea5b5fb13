"""Small closed tables of common knowledge: capitals, opposites, animal sounds, the calendar, colours."""

from random import Random

from demo.corpus.scene import Scene, ask, casual
from demo.corpus.words import DAYS, MONTHS, with_article


def _table(text: str) -> dict[str, str]:
    return dict(row.split(":") for row in text.split("|"))


CAPITALS = _table(
    "France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|Portugal:Lisbon|Austria:Vienna|England:London|Ireland:Dublin|"
    "Norway:Oslo|Sweden:Stockholm|Finland:Helsinki|Denmark:Copenhagen|Poland:Warsaw|Greece:Athens|Egypt:Cairo|"
    "Japan:Tokyo|China:Beijing|India:New Delhi|Russia:Moscow|Canada:Ottawa|Australia:Canberra|Brazil:Brasilia|"
    "Argentina:Buenos Aires|Chile:Santiago|Peru:Lima|Mexico:Mexico City|Cuba:Havana|Kenya:Nairobi|Turkey:Ankara|"
    "Hungary:Budapest|the United States:Washington|the United Kingdom:London|South Korea:Seoul|Belgium:Brussels|"
    "the Netherlands:Amsterdam|Switzerland:Bern|Ukraine:Kyiv|Iceland:Reykjavik|Thailand:Bangkok|Vietnam:Hanoi"
)
OPPOSITES = _table(
    "hot:cold|big:small|tall:short|fast:slow|happy:sad|old:new|young:old|light:dark|hard:soft|wet:dry|good:bad|up:down|"
    "left:right|open:closed|early:late|rich:poor|strong:weak|full:empty|clean:dirty|high:low|loud:quiet|near:far|"
    "black:white|day:night|easy:difficult|thick:thin|true:false|first:last|sweet:sour|warm:cool|cold:hot|small:big"
)
SOUNDS = _table(
    "cat:meow|dog:woof|cow:moo|sheep:baa|duck:quack|lion:roar|mouse:squeak|bee:buzz|horse:neigh|pig:oink|owl:hoot|"
    "frog:croak|wolf:howl|crow:caw|snake:hiss|hen:cluck"
)
COLOURS_OF = _table(
    "the sky:blue|grass:green|snow:white|blood:red|the sun:yellow|coal:black|milk:white|a banana:yellow|a lemon:yellow|"
    "a carrot:orange|a tomato:red|chocolate:brown|the sea:blue|a frog:green|an elephant:grey|a cherry:red"
)
LEGS = _table("a dog:4|a cat:4|a spider:8|an ant:6|a bird:2|a horse:4|a snake:0|a bee:6|a duck:2|a cow:4|a fish:0")


def capital(rng: Random) -> Scene:
    country, city = rng.choice(list(CAPITALS.items()))
    form = rng.choice(
        (
            "What is the capital of {}?",
            "What's the capital of {}?",
            "Which city is the capital of {}?",
            "Tell me the capital of {}.",
            "Name the capital of {}.",
            "Do you know the capital of {}?",
            "capital of {}",
            "The capital of {}?",
        )
    )
    country_start = country[0].upper() + country[1:]
    answer = f"The capital of {country} is {city}."
    return ask("facts: capitals", casual(rng, form.format(country)), answer, (answer, f"{city}, {country_start}."))


def opposite(rng: Random) -> Scene:
    word, other = rng.choice(list(OPPOSITES.items()))
    form = rng.choice(
        ("What is the opposite of {}?", "What's the opposite of {}?", "Name the opposite of {}.", "Opposite of {}?")
    )
    return ask("facts: opposites", casual(rng, form.format(word)), f"The opposite of {word} is {other}.")


def animal_sound(rng: Random) -> Scene:
    animal, sound = rng.choice(list(SOUNDS.items()))
    form = rng.choice(("What does {} say?", "What sound does {} make?", "Which sound does {} make?"))
    noun = with_article(animal)
    return ask("facts: sounds", casual(rng, form.format(noun)), f"{noun.capitalize()} says {sound}.")


def colour(rng: Random) -> Scene:
    thing, value = rng.choice(list(COLOURS_OF.items()))
    form = rng.choice(("What colour is {}?", "Which colour is {}?", "What color is {}?", "Tell me the colour of {}."))
    return ask("facts: colours", casual(rng, form.format(thing)), f"{thing[0].upper() + thing[1:]} is {value}.")


def legs(rng: Random) -> Scene:
    animal, count = rng.choice(list(LEGS.items()))
    form = rng.choice(("How many legs does {} have?", "How many legs has {}?", "Count the legs of {}."))
    answer = f"{animal.capitalize()} has {'no' if count == '0' else count} legs."
    return ask("facts: legs", casual(rng, form.format(animal)), answer)


def calendar(rng: Random) -> Scene:
    names, unit = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    index = rng.randrange(len(names))
    step, word = rng.choice(((1, "after"), (-1, "before")))
    form = rng.choice(
        ("What {u} comes {w} {n}?", "Which {u} is {w} {n}?", "Which {u} comes {w} {n}?", "What comes {w} {n}?")
    )
    other = names[(index + step) % len(names)]
    question = form.format(u=unit, w=word, n=names[index])
    return ask("facts: calendar", casual(rng, question), f"{other} comes {word} {names[index]}.")


def fact(rng: Random) -> Scene:
    return rng.choice((capital, capital, opposite, animal_sound, colour, legs, calendar))(rng)
