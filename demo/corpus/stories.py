"""Short stories from a grammar: a hero, a plot of four to six sentences, and pronouns that agree."""

from dataclasses import dataclass
from random import Random

from demo.corpus.scene import Scene, ask, casual, skewed
from demo.corpus.words import ANIMALS, BOYS, GIRLS, JOBS, made_up_word, phrases_of, with_article, words_of

_TRAITS = words_of("small clever brave curious kind young shy old lazy merry")
_HOMES = phrases_of(
    "in a dark forest|near a quiet river|on a green hill|in a little village|by the sea|under an old tree|"
    "behind a red barn|in a snowy valley"
)
_FRIENDS = words_of("owl mouse rabbit turtle bird bear frog hedgehog squirrel deer")
_TREASURES = phrases_of(
    "a golden key|a silver bell|a red kite|a shiny stone|a warm scarf|a little boat|an old map|a blue lantern"
)
_ENDINGS = phrases_of(
    "From that day on, they were the best of friends.|And they lived happily ever after.|"
    "That night, {name} slept very well.|{name} never forgot that day.|And everybody in the valley was happy."
)
_PLOTS = (
    "One morning, {name} lost {thing}.|{He} looked everywhere, but could not find it.|"
    "Then {name} met {friend} who had seen it near the bridge.|Together they found it, and {name} said thank you.",
    "One day, {name} heard a cry for help.|It was {friend} who had fallen into a deep hole.|"
    "{name} found a long rope and pulled with all {his} strength.|Soon the {friend_noun} was safe again.",
    "One evening, a great storm came and {name} was afraid.|{He} ran to the house of {friend}.|"
    "They sat by the fire, drank hot tea and told stories.|When the sun came back, {name} was not afraid any more.",
    "{name} dreamed of finding {thing}.|So {he} walked for three days and three nights.|"
    "At the end of the road, {friend} was waiting with a smile.|"
    "The {friend_noun} gave {him} {thing}, and {name} was full of joy.",
    "{name} had no friends and felt lonely.|One day, {he} met {friend} who was lonely too.|"
    "They shared some bread and played until the evening.|Now neither of them was lonely.",
    "One night, {name} saw a strange light in the sky.|{He} followed it over the hills with {friend}.|"
    "Behind the last hill, they found {thing}.|They took it home and showed it to everybody.",
)
_REQUESTS = phrases_of(
    "Tell me a story|Tell me a short story|Write a story|Write a short story|Can you tell me a story|I want a story|"
    "Tell me a tale|Write me a story|Tell a story|Please tell me a story|Make up a story|Give me a short story|"
    "Tell me a bedtime story|I would like to hear a story|Write a short bedtime story"
)
_SHORT_REQUESTS = phrases_of(
    "Tell me a one-sentence story|Write a one-sentence story|Write a one-sentence bedtime story|"
    "Tell me a very short story"
)


@dataclass(frozen=True, slots=True)
class Hero:
    """`noun` is what the hero is (fox, baker); pronouns follow `is_female`."""

    noun: str
    name: str
    is_female: bool

    def words(self) -> dict[str, str]:
        he, him, his = ("she", "her", "her") if self.is_female else ("he", "him", "his")
        return {"name": self.name, "he": he, "He": he.capitalize(), "him": him, "his": his}


def hero(rng: Random, noun: str) -> Hero:
    if noun in ("girl", "princess", "queen", "boy", "prince", "king"):
        is_female = noun in ("girl", "princess", "queen")
    else:
        is_female = rng.random() < 0.5
    return Hero(noun, skewed(rng, GIRLS if is_female else BOYS), is_female)


def opening(rng: Random, who: Hero) -> str:
    who_lived = f"{with_article(skewed(rng, _TRAITS))} {who.noun} named {who.name}"
    home = skewed(rng, _HOMES)
    return skewed(
        rng,
        (f"Once upon a time, {who_lived} lived {home}.", f"Once there was {who_lived} who lived {home}."),
    )


def sentences(rng: Random, who: Hero) -> list[str]:
    friend = skewed(rng, [noun for noun in _FRIENDS if noun != who.noun])
    words = who.words() | {
        "thing": skewed(rng, _TREASURES),
        "friend": with_article(friend),
        "friend_noun": friend,
    }
    plot = phrases_of(skewed(rng, _PLOTS).format(**words))
    return [opening(rng, who), *plot, skewed(rng, _ENDINGS).format(**words)]


def _subject(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.6:
        return rng.choice(ANIMALS)
    if roll < 0.75:
        return rng.choice(("girl", "boy", "princess", "prince", "king", "queen", "witch", "knight", "pirate", "wizard"))
    return rng.choice(JOBS) if roll < 0.87 else made_up_word(rng)


def story(rng: Random) -> Scene:
    requests, is_short = (_SHORT_REQUESTS, True) if rng.random() < 0.12 else (_REQUESTS, False)
    noun, question = _subject(rng), rng.choice(requests)
    mentions = ["."]
    if rng.random() < 0.8:
        about = f"{rng.choice(('a', 'the'))} {noun}" if rng.random() < 0.1 else with_article(noun)
        question += f" about {about}"
        mentions = [f" {noun} "]
    else:
        noun = skewed(rng, ANIMALS)
    who = hero(rng, noun)
    if len(mentions[0]) > 1 and rng.random() < 0.15:
        question += f" named {who.name}"
        mentions.append(who.name)
    mark = "?" if question.startswith("Can") else rng.choice((".", ".", ".", ""))
    text = opening(rng, who) if is_short else " ".join(sentences(rng, who))
    if is_short:
        return ask("stories: one sentence", casual(rng, question + mark), text, mentions=mentions)
    return ask("stories", casual(rng, question + mark), text, mentions=mentions)


def plain_text(rng: Random) -> str:
    """A story outside any dialogue, for plain completions."""
    return " ".join(sentences(rng, hero(rng, _subject(rng))))
