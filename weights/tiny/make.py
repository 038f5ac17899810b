#!/usr/bin/env python3
"""Makes weights/tiny: a 2.4-million-parameter, byte-level Llama that writes very short stories.

  python3 weights/tiny/make.py --show 5                 print five texts of the grammar
  python3 weights/tiny/make.py --minutes 2              train (on CUDA if there), write beside this
  python3 weights/tiny/make.py --minutes 2 --out DIR    the same, written to DIR
  python3 weights/tiny/make.py --readme                 train.json -> the table in weights/README.md

Needs Python 3.9+, numpy and PyTorch 2.5+; no network and no data set. The map:

  1. grammar   every text the model ever sees is generated here, so there is no licence to ask about
  2. corpus    texts joined by byte 0: the model ends a text by emitting it
  3. model     Hugging Face's LlamaForCausalLM, written out; the tensor names are theirs
  4. train     AdamW, cosine schedule over a time limit or a number of steps
  5. save      fp16 safetensors + config.json; the fp16-rounded weights are what is evaluated

A text is its bytes. The vocabulary is the 256 byte values. Byte 0 never occurs inside a text.
"""
import argparse
import hashlib
import json
import math
import multiprocessing
import os
import random
import re
import statistics
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))

# ------------------------------------------------------------------------------------------------
# 1. The grammar
#
#   rule:          a name, then its alternatives, one "- " each (indented lines go on)
#   {rule}         expands another rule
#   {slot} {Slot}  what Writer.draw drew; it stays the same all through one text
#   [a|b|]         picks one of the alternatives, possibly nothing
#   /              a new paragraph
#
# A and B are the two characters (never of one gender, so that "he" and "she" say who is meant);
# {he} {him} {his} are A's pronouns, {he2} {him2} {his2} are B's. What one sentence introduces, a
# later one takes up again: that is what the model's attention has to learn.

NAMES = {
    "she": """
        Mina Lily Anna Rosa Ella Ivy Nora Hazel Wren Olive Tilda June Maud Pearl Fern Greta
        Daisy Luna Ada Clara Poppy Ruth Sula Zoe Agnes Bea Cora Dora Elsie Flora Nell Martha""",
    "he": """
        Tom Max Ben Otto Finn Hugo Oscar Jonas Felix Emil Theo Rufus Barnaby Sam Leo Arlo Bruno
        Cyril Edgar Fritz Gus Henry Igor Jasper Kit Ludo Milo Ned Oren Percy Walter Bill""",
}
PRONOUNS = {"she": ("she", "her", "her", "herself"), "he": ("he", "him", "his", "himself")}

KINDS = """
    fox: den, blackberries; owl: hollow tree, seed cake; hedgehog: pile of leaves, mushrooms;
    badger: burrow, turnips; rabbit: burrow, carrots; bear: cave, honey; mouse: teapot, cheese;
    duck: nest, bread; goat: shed, clover; cat: basket, cream; otter: den, smoked fish;
    squirrel: nest, hazelnuts; turtle: mud hut, lettuce; crow: nest, cherries;
    mole: tunnel, potatoes; frog: mud hut, lily soup; donkey: stable, apples;
    dragon: cave, hot peppers; robot: tool shed, machine oil; baker: cottage, buns;
    sailor: houseboat, fish soup; tailor: attic, toast; painter: attic, plums;
    gardener: cottage, pears; miller: windmill, fresh bread; clockmaker: tower, ginger biscuits;
    wizard: tower, pancakes; ghost: cellar, cold porridge; giant: cave, whole pumpkins"""
KINDS = [tuple(re.split(": |, ", kind.strip())) for kind in KINDS.split(";")]  # kind, home, food

TRAITS = """small young old shy brave curious clever kind sleepy stubborn cheerful careful lonely
    quiet proud hungry forgetful polite gentle busy grumpy dreamy patient""".split()

THINGS = [("brass silver wooden tin golden little strange rusty glass".split(),
           "key bell lantern boat box whistle spoon drum flute clock crown wheel mirror".split()),
          ("red blue green yellow striped purple patched velvet".split(),
           "kite scarf umbrella hat ball ribbon blanket coat flag bag".split())]
CLOTHES = "scarf hat coat crown nightcap waistcoat raincoat".split()

PLACES = """
    in the forest; on the hill; by the sea; near the mill; under the bridge; behind the bakery;
    at the end of the lane; beside the river; on a quiet island; in the village;
    at the edge of the marsh; in a garden full of roses; above the harbour;
    between two mountains; next to the railway; in the valley; across the lake"""
PLACES = [p.strip() for p in PLACES.split(";")]

SPOTS = """
    old bridge; apple tree; well; garden gate; stone wall; big oak; haystack; pond;
    market square; crossroads; ferry; signpost; beehive; church door"""
SPOTS = [s.strip() for s in SPOTS.split(";")]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SEASONS = "spring summer autumn winter".split()

GRAMMAR = """
story:
- {line}
- {line}
- {brief}
- {brief}
- {brief}
- {letter}
- {scene}
- {scene}
- {tale}
- {tale}
- {tale}
- {tale}

line:
- {A} the {kind} [found|lost|hid|mended|painted|sold|borrowed|buried] a {thing} {place}.
- Every [morning|evening|night] {A} the {trait} {kind} [counts the stars|sings to the moon|sweeps
  the steps|waters the roses|feeds the fish|winds the clock] and [goes back to bed|drinks a cup of
  tea|says thank you|laughs].
- {A} wanted {food}, but {B} the {kind2} had eaten every [crumb|last bit].
- On {day} it {weather}, so {A} the {kind} stayed in {his} {home} and dreamed of {food}.
- The {trait} {kind} gave {his} {thing} to {B}, and that was that.
- "Good night, {B}," said {A} the {kind}, and [blew out the lamp|closed the door|pulled up the
  blanket].
- Nobody knew that the {trait} {kind} {place} [could dance|wrote poems|was afraid of moths|had
  once been a king|kept a {thing} under the bed].
- {A} asked the moon for a {thing}, and the moon only [smiled|yawned|went behind a cloud].
- Hush, the {trait} {kind} is asleep {place}, with a {thing} [under one arm|for a pillow].
- If you meet a {trait} {kind} {place}, [bow twice|say nothing|ask about the {noun}|offer {food}].
- {A} and {B} [sat|danced|fished|argued] by the {spot} until [the rain came|it was dark|supper was
  ready].

brief:
- {A} the {kind} had a {thing}, and {B} the {kind2} had {food2}. They traded {place}, and [each
  went home sure of having won|both were happy for a week|neither ever said who had won].
- It {weather} all day {place}. {A} the {kind} lit a lamp, made some tea and read a book about
  [dragons|the sea|clocks|famous soups]. When {B} knocked, there was just enough tea for two.
- "What is the best thing in the world?" asked {A} the {kind}. {B} thought about it [for an
  hour|all the way home|while the kettle boiled]. "{Food2}," {he2} said at last.
- {A} could not sleep. {He} counted sheep, then clouds, then spoons. At [ninety-nine|forty|three
  hundred] spoons the {trait} {kind} began to snore, and {B} [turned out the light|shut the
  window|smiled].
- {A} the {kind} planted a {noun} {place} and watered it for a week. Nothing grew. "That is not a
  seed," said {B}. "Perhaps it is only shy," said {A}, and [went on watering|sang to it].
- A {kind2} named {B} came to tea {place}. {A} offered {food}, and {B} had brought {food2}.
  [Nobody went home hungry.|They ate everything and slept until {day}.|"To us!" said {A}, and lifted
  {his} cup.]
- There are three things that {A} the {kind} loves: {food}, [warm rain|clean socks|the smell of
  books|a good nap], and {B}. [But do not tell {B}.|{B} comes first.|{Food} comes first.]
- Today I saw a {trait} {kind} {place}. {He} carried a {thing} and did not look back. I wonder
  [where {he} was going|who it was for|whether {he} will be there on {day}].
- "Is it far?" asked {A}. "Not if we sing," said {B} the {kind2}. So they sang, and soon they
  stood at the {spot}, [out of breath|hoarse and happy|and it was still {day}].
- The {trait} {kind} wore a {garment} [to bed|in the bath|on {day}]. "Why?" asked {B}. "Why not?"
  said {A}, and {B} could not think of an answer.
- {A} the {kind} told a joke on {day}. {B} the {kind2} understood it on {day2}, in the middle of
  the [night|market|concert], and [fell off {his2} chair|woke the whole street|laughed until {he2}
  cried].
- Why does the {kind} {habit}? Long ago the {kind} [lent|sold|lost] something to the moon. It was
  a {thing}. [And so the {kind} is still waiting.|The moon has never given it back.]

letter:
- Dear {B}, / [Thank you for the {thing}. It came on {day}|I found your {thing} by the {spot}|I am
  sending you my {thing}]. {news} [Please come to tea soon.|Do write back.] There will be {food2}.
  / Your friend, / {A}
- Dear {B}, / {news} {news2} [I hope you are well.|I miss you.|] / Yours, {A} the {kind}
- Dear {Kind2}, / please stop [singing at night|borrowing my {noun}|eating my {food}]. / Your
  neighbour, / {A} / P.S. [You sing quite well.|You may keep it until {day}.|There is more in the
  cellar.]

news:
- It has {weathered} here since {day}.
- My {home} is [warm|full of guests|much too quiet] without you.
- [Yesterday|Last night] I dreamed of {food} again.

news2:
- The {trait2} {kind2} {place} asked about you.
- I have bought a {thing} and I do not know why.
- I can see the {spot} from my window, and I think of you.

scene:
- {open} {more} {event} {close}
- {open} {more} / {event} / {close}
- {title} / {open} {more} / {event} / {after}

tale:
- {title} / {plot}
- {plot}
- {plot}
- {plot} / {after}

title:
- The {Kind} and the {Kind2}
- {A} and {B}
- The {Trait} {Kind}

open:
- Once upon a time, there [was|lived] a {trait} {kind} named {A} {place}.
- Once upon a time, {place}, there lived a {trait} {kind} [called|named] {A}.
- Long ago there was a {trait} {kind} called {A}.
- {Place} there lived a {trait} {kind} named {A}.
- {A} was a {trait} {kind} who lived in a {home} {place}.
- There was once a {kind} named {A}, who {habits} and loved {food}.
- A {trait} {kind} called {A} lived {place}, and {habits2}.
- The {kind} of this story was called {A}. {He} {habits}.
- This is the story of {A}, a {trait} {kind} {place}.
- In a {home} {place} there lived a {trait} {kind} by the name of {A}.

more:
- {He} {habits}.
- {He} was very fond of {food}.
- {His} {home} had [one window|no door|a crooked chimney|a blue door] and a view of the {spot}.
-
-

event:
- One {season} evening {he} met {B} the {kind2} by the {spot}. "Do you like {food}?" asked {A}.
  "[Only on {day}|Very much|I have never tried]," said {B}. {A} held out a plate, [and that was
  the beginning|and they sat down together].
- On {day} a {thing} fell from the sky and landed [at {his} feet|in {his} soup|on {his} head].
  Nobody came to fetch it, so {he} [kept it|gave it to {B} the {kind2}|hung it in the window].
- {He} wrote a book about {food}. {B} the {kind2} read it twice and asked for [more pictures|a
  happier ending|a second volume]. "{Day} at the latest," said {A}.
- Every {day} {he} carried {food} to {B} the {kind2}, who lived alone by the {spot}. {B} never
  said thank you, but the [door was always open|fire was always lit|path was always swept].
- One night {he} left a {thing} by the {spot}, for anyone who might need it. In the morning it was
  gone. In its place there was a note: "[Thank you|Just what I needed|It fits]. {B}."
- {He} built a raft and asked {B} the {kind2} to come along. They sailed as far as the {spot},
  [where they stuck fast|which is not far], and had {food} on deck. "[Land|A whale|Dry feet]!"
  cried {B}.
- {He} lost a bet with {B} the {kind2} and had to wear a {garment} until {day}. [It suited {him}
  well.|By then everyone wanted one.|{He} never took it off again.]
- {He} and {B} the {kind2} could not agree about {food}. {A} had some at breakfast, and {B} only at
  supper. In the end they both had some [at noon|at midnight|at breakfast and at supper].

plot:
- {open} {He} had a {thing} and took it everywhere. / One {season} morning the {noun} was gone.
  {A} looked [under the bed|behind the stove|in the rain barrel], [on the roof|among the
  turnips|up the chimney] and even [inside the piano|in the soup|under the mat], but found only
  [dust|a spider|one old sock]. / "Where were you happiest yesterday?" asked {B} the {kind2}. {A}
  [thought hard|closed {his} eyes|counted on {his} fingers]. Then {he} ran to the {spot}, and
  there lay the {noun}, [shining in the grass|wet with dew|just where {he} had left it]. / {close}
- {open} / One {season} night a storm came. The wind [howled|roared|whistled] in the chimney, and
  the rain beat on the [roof|door|windows]. "Help!" cried a voice. It was {B} the {kind2}, who
  could not find {his2} {home2}. / {A} opened the door at once. "Come in," {he} said. "There is
  [soup on the stove|tea in the pot] and room by the fire." They told stories until [dawn|the
  candle went out], and in the morning they found the {home2}, [wet but whole|just around the
  corner]. / {close}
- {open} {His} best friend was {B} the {kind2}. / {B}'s birthday came, and {A} had no
  [money|coins]. So {he} took [some string|an old box|a bit of wire], [three nails|a drop of
  glue|two buttons] and [all {his} patience|a whole afternoon], and made a {thing}. It was a
  little crooked. / "It is [the best {noun} in the world|perfect]," said {B}, and [hung it over
  the door|never once put it down|wept for joy]. / {close}
- {open} / Every {season} there was a race from the {spot} to the {spot2}. The prize was a
  {thing}. "You will come last," said {B} the {kind2}, who always won. {A} [only smiled|said
  nothing|tied {his} shoes]. / {B} ran like the wind, and then stopped to [eat {food2}|sleep in
  the shade|comb {his2} hair]. {A} walked and walked. When {B} looked up, {A} was already
  [there|across the line], holding the {noun}. / {close}
- {open} {A} was afraid of the dark. / One {season} night there was a [knock|scratch] at the
  window. It was {B} the {kind2}. "I am afraid of the dark," [whispered|said] {B}. "May I stay
  with you?" / "I am afraid too," said {A}. They sat [side by side|close together], and the dark
  was only half as big. [After a while they saw the stars.|They counted [ten|forty|a hundred]
  stars and fell asleep.] / {close}
- {open} / One {season} night a star fell beside the {spot}. It was no bigger than [an egg|a pea|a
  button], and it [hummed|glowed]. "You may have one wish," it said. / {A} thought of {food}, and
  of a {thing}. But {B} the {kind2} was [ill, so {A} wished for {B} to be well|sad, so {A} wished
  for {B} to laugh again|far away, so {A} wished for {B} to come home]. The star winked and went
  out. / In the morning there was a knock at the door. It was {B}, with {food2}. / {close}
- {open} / One day {A} found a map in [a bottle|an old book|a boot]. There was a red cross by the
  {spot}. {He} packed {food} and a {thing} and called for {B} the {kind2}. They went over [two
  hills|three bridges], through [the fog|a field of thistles] and past [the windmill|a very rude
  goose]. / "Dig here," said {B}. They dug until [noon|the moon came up], and found a box. In the
  box was a note. It said: "[Too late, I spent it.|The treasure was the walk.|Please fill in this
  hole.]" / {A} laughed so hard that {he} [fell into the hole|got the hiccups]. {close}
- {open} One day a {kind2} named {B} moved in next door. / {B} hammered all night. "Not again!"
  said {A}, and [banged on the wall|put wool in {his} ears]. On {day} {he} went over to complain,
  and the door was open. / {B} was making a {thing}. "It is for you," {he2} said. "I did not know
  how to say hello." {A} [forgot why {he} had come|turned quite red|held the {noun} and could not
  speak]. / {close}
- {open} / All summer {A} gathered {food}, and {B} the {kind2} [sang|danced|played the fiddle].
  Then the snow came, and {B} stood at the door, [cold and hungry|thin and shivering]. / "What did
  you do all summer?" asked {A}. "I made [music|songs]," said {B}. "Good," said {A}. "Come in and
  make some now, and I will set the table." / So they shared the {food} until [spring|the ice
  broke]. {close}
- {open} {His} {thing} was broken. "Throw it away," said everyone. / But {A} took it to {B} the
  {kind2}, who could mend anything. {B} [turned it over twice|looked at it through a glass]. "It
  will take until {day}," {he2} said, "and a plate of {food2}." / On {day} the {noun} was whole
  again, with a thin gold line where the crack had been. "Now it has a story," said {B}. / {close}
- {open} / In spring {A} planted a [round|striped|very old] seed by the {spot}. "Nothing will come
  of it," said {B} the {kind2}. {A} watered it every [day|morning]. It grew past the
  [window|fence], and past the roof, and at the very top there hung a {thing}. / "That is not in
  any of my books," said {B}. {A} climbed up and brought down the {noun}, and [they took turns
  with it|gave it to {B}|kept one seed for next year]. / {close}
- {open} / Every night there was a noise by the {spot}. [Thump|Clink|Whoo|Scrape], it went. "It is
  a monster," said everyone. So {A} took a lamp and a {thing} and went to see. / It was no
  monster. It was {B} the {kind2}, learning to [dance|juggle|play the trumpet]. "Please do not
  tell," said {B}. "I will not," said {A}, "if you teach me." / Now the noise is twice as loud,
  and nobody knows why. {close}
- {open} / One morning {A} found a bottle with a note in it. "[I am alone|It is quiet here].
  Please write back. {B}." {A} wrote about {food} and the weather, and threw the bottle into the
  water. / The letters went to and fro all {season}. Then a boat came. In it sat a {trait2}
  {kind2} with a {thing}. "I got tired of waiting for the tide," said {B}. / {close}
- {open} {He} wanted to touch the moon. / {A} put a chair on the table and a {noun} on the chair,
  and {B} the {kind2} held it all steady. "Can you reach it?" asked {B}. "[Almost|Not quite],"
  said {A}. Then everything fell down. / They lay on their backs in the grass, and there was the
  moon, in the [pond|puddle |bucket]. {A} put out one finger and touched it. "It is [wet|cold],"
  {he} said. / {close}
- {open} {He} never [said no|told a lie|finished a book]. / On {day} {B} the {kind2} came to
  borrow a {thing}. On {day2} {he2} came to borrow {food}. "Is there anything else?" asked {A}.
  "Yes," said {B}, and looked at {his2} feet. "I should like to borrow you, for a walk to the
  {spot}." / They walked there and back. {B} returned the {noun} the next day, but {he2} [kept the
  friend|asked for another walk]. / {close}

close:
- [From that day on|After that|Ever since], {A} and {B} were [the best of friends|never apart for
  long].
- And {A} [slept very well that night|was never lonely again|told the story every {season}].
- "What a [day|night|business]," said {A}, and {B} agreed.
- They had {food} for supper, and {food2} after that.
- Ask {B} about it, if you ever go there. {He2} will [laugh|tell you a different story|say it was
  all true].
- And that was the end of {A}'s [quiet|lonely|ordinary] days.
-

after:
- The end.
- And if they have not moved away, they live {place} still.
- Years later, when {A} was [old and grey|a little deaf|famous], {he} still spoke of that
  {season}, and of {B}, and of {food}.
- If you ask {A} today, {he} will say that it was all {B}'s idea. {B} says [nothing, and passes
  the {food2}|it was {A}'s].
- The {spot} is still there. On a quiet {season} night you can hear [somebody laughing|two
  voices|a little music], and then a door, and then nothing.

weather:
- [rained|snowed|hailed|was foggy|was very hot]

weathered:
- [rained|snowed|been foggy|been far too hot]

habit:
- [sleep all day|hum at night|look up so often|walk in circles|never say goodbye]

habits:
- [slept all day|hummed at night|collected buttons|talked to trees|never hurried|wrote everything
  down]

habits2:
- [everyone knew {him}|hardly anyone knew {him}|nobody had ever seen {him} cry|{he} was proud of
  it]
"""


def compile_template(text):
    """'a [b|c] {d}' -> ['a ', [['b'], ['c']], ' ', '{d}']: literals, choices and {slots}."""
    stack = [[[]]]  # of choices; a choice is a list of alternatives, an alternative a list of items
    for token in re.findall(r"\{\w+\}|[\[\]|]|[^\[\]{}|]+", text):
        if token == "[":
            stack.append([[]])
        elif token == "|":
            stack[-1].append([])
        elif token == "]":
            choice = stack.pop()
            stack[-1][-1].append(choice)
        else:
            stack[-1][-1].append(token)
    assert len(stack) == 1 and len(stack[0]) == 1, f"unbalanced template: {text}"
    return stack[0][0]


def compile_grammar(text):
    """GRAMMAR -> {rule: [compiled alternative, ...]}."""
    rules = {}
    for block in re.split(r"\n(?=\w+:\n)", text.strip()):
        name, body = block.split(":\n", 1)
        alternatives = re.split(r"(?:^|\n)-", body)[1:]
        rules[name] = [compile_template(" ".join(a.split())) for a in alternatives]
    return rules


class Writer:
    """Writes texts. nats sums -log(probability) over every choice made: divided by the bytes, it is
    the loss of a model that knows this grammar by heart (or a little more, where two ways to choose
    make the same text)."""

    rules = compile_grammar(GRAMMAR)

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.nats = 0.0
        self.slots = {}

    def pick(self, options):
        self.nats += math.log(len(options))
        return options[int(self.random.random() * len(options))]

    def draw(self, slot):
        """Draws a slot on its first use in a text, and everything that goes with it."""
        base, other = slot.rstrip("2"), "" if slot.endswith("2") else "2"
        taken = self.slots.get(base + other)  # {spot2} is another spot than {spot}
        if slot in ("A", "B"):
            self.slots[slot] = self.pick(NAMES[self.value("he" if slot == "A" else "he2")].split())
        elif base in ("he", "him", "his", "himself"):
            for suffix, gender in zip(("", "2"), self.pick([("she", "he"), ("he", "she")])):
                self.slots.update(zip((p + suffix for p in PRONOUNS["he"]), PRONOUNS[gender]))
        elif base in ("kind", "home", "food"):
            options = [k for k in KINDS if k[0] != self.slots.get("kind" + other)]
            kind, home, food = self.pick(options)
            suffix = slot[len(base):]
            self.slots.update({"kind" + suffix: kind, "home" + suffix: home, "food" + suffix: food})
        elif base in ("thing", "noun"):
            adjectives, nouns = self.pick(THINGS)
            self.slots["noun"] = self.pick(nouns)
            self.slots["thing"] = self.pick(adjectives) + " " + self.slots["noun"]
        elif base == "garment":
            self.slots[slot] = self.pick(THINGS[1][0]) + " " + self.pick(CLOTHES)
        else:
            lists = {"trait": TRAITS, "place": PLACES, "spot": SPOTS,
                     "day": DAYS, "season": SEASONS}
            self.slots[slot] = self.pick([x for x in lists[base] if x != taken])

    def value(self, slot):
        key = slot if slot in "AB" else slot[0].lower() + slot[1:]
        if key not in self.slots:
            self.draw(key)
        value = self.slots[key]
        return value[0].upper() + value[1:] if slot[0].isupper() else value

    def expand(self, template):
        out = []
        for item in template:
            if isinstance(item, list):
                out.append(self.expand(self.pick(item)))
            elif item[0] != "{":
                out.append(item)
            elif item[1:-1] in self.rules:
                out.append(self.expand(self.pick(self.rules[item[1:-1]])))
            else:
                out.append(self.value(item[1:-1]))
        return "".join(out)

    def text(self):
        self.slots = {}
        text = self.expand(self.pick(self.rules["story"]))
        text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)  # a owl -> an owl
        text = re.sub(r" +([.,])", r"\1", re.sub(r" +", " ", text))
        return re.sub(r" ?/ ?", "\n", text).strip()


# ------------------------------------------------------------------------------------------------
# 2. The corpus

def write_chunk(job):
    """(seed, size) -> at least size bytes of texts, each followed by byte 0, and their nats."""
    seed, size = job
    writer, texts, total = Writer(seed), [], 0
    while total < size:
        texts.append(writer.text().encode("ascii") + b"\0")
        total += len(texts[-1])
    return b"".join(texts), writer.nats


def write_corpus(seed, megabytes):
    """The same corpus for the same seed, on any number of cores."""
    jobs = [(seed * 1000003 + i, 1 << 20) for i in range(megabytes)]
    with multiprocessing.Pool() as pool:
        chunks = pool.map(write_chunk, jobs, chunksize=1)
    data = np.frombuffer(b"".join(c for c, _ in chunks), np.uint8)
    return data, sum(n for _, n in chunks) / len(data)


class Windows:
    """Draws training windows from the corpus: half begin where a text begins (as a prompt does, no
    byte 0 before it), half anywhere, so that the model can also go on from the middle of a text.
    A window runs across text ends; a short one is mostly its first text, a long one teaches the
    positions up to 1023."""

    LENGTHS = (256, 512, 1024)

    def __init__(self, data, device, seed):
        self.data = torch.from_numpy(data.copy()).to(device)
        starts = torch.from_numpy(np.flatnonzero(data == 0) + 1).to(device)
        self.starts = starts[starts < len(data) - 1 - max(self.LENGTHS)]
        self.generator = torch.Generator(device).manual_seed(seed)

    def draw(self, n_tokens, length):
        n = max(2, n_tokens // length)
        on = {"device": self.data.device}
        text = torch.randint(len(self.starts), (n // 2,), generator=self.generator, **on)
        limit = len(self.data) - 1 - length
        anywhere = torch.randint(limit, (n - n // 2,), generator=self.generator, **on)
        first = torch.cat([self.starts[text], anywhere])[:, None]
        rows = self.data[first + torch.arange(length + 1, **on)].long()
        return rows[:, :-1], rows[:, 1:]  # [n, length] each


# ------------------------------------------------------------------------------------------------
# 3. The model: LlamaForCausalLM

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float16",
}


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight, CONFIG["rms_norm_eps"])


class Attention(nn.Module):
    def __init__(self, layer, c=CONFIG):
        super().__init__()
        d, k = c["hidden_size"], c["head_dim"]
        self.q_proj = nn.Linear(d, c["num_attention_heads"] * k, bias=False)
        self.k_proj = nn.Linear(d, c["num_key_value_heads"] * k, bias=False)
        self.v_proj = nn.Linear(d, c["num_key_value_heads"] * k, bias=False)
        self.o_proj = nn.Linear(c["num_attention_heads"] * k, d, bias=False)
        self.layer = layer

    def forward(self, x, cos, sin, cache):
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, -1, CONFIG["head_dim"]).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))  # [b, heads, t, head_dim]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            if self.layer in cache:
                k, v = (torch.cat(pair, 2) for pair in zip(cache[self.layer], (k, v)))
            cache[self.layer] = k, v
        causal = t > 1  # a cache is filled by one prompt, then read by one token at a time
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


def rotate(x, cos, sin):
    """RoPE in Hugging Face's layout: dimension i turns with dimension i + head_dim / 2."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, c=CONFIG):
        super().__init__()
        d, f = c["hidden_size"], c["intermediate_size"]
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.input_layernorm = RMSNorm(CONFIG["hidden_size"])
        self.self_attn = Attention(layer)
        self.post_attention_layernorm = RMSNorm(CONFIG["hidden_size"])
        self.mlp = MLP()

    def forward(self, x, cos, sin, cache):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, c=CONFIG):
        super().__init__()
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(c["vocab_size"], c["hidden_size"]),
            "layers": nn.ModuleList(Layer(i) for i in range(c["num_hidden_layers"])),
            "norm": RMSNorm(c["hidden_size"]),
        })
        for name, p in self.named_parameters():
            if p.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * c["num_hidden_layers"]) ** -0.5 if into_residual else 1.0
                nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5 * scale)
        frequency = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2) / c["head_dim"])
        angle = torch.arange(c["max_position_embeddings"])[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)  # [position, head_dim / 2]
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids, cache=None, position=0):
        """ids [b, t], the first at position -> logits [b, t, 256]. cache: {}, it keeps K, V."""
        rows = slice(position, position + ids.shape[1])
        x = self.model["embed_tokens"](ids)
        for layer in self.model["layers"]:
            x = layer(x, self.cos[rows], self.sin[rows], cache)
        with torch.autocast(x.device.type, enabled=False):  # bf16 logits would be too coarse
            return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)


@torch.no_grad()
def generate(model, prompts, temperature, seed, limit=1000):
    """Continues prompts (byte strings of one length) up to byte 0 -> [(bytes, ended), ...]."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.tensor([list(p) for p in prompts])
    out, cache, step = [[] for _ in prompts], {}, ids
    position = 0
    while position + step.shape[1] < limit and not all(o and o[-1] == 0 for o in out):
        logits = model(step, cache, position)[:, -1].float()
        position += step.shape[1]
        if temperature > 0:
            step = torch.multinomial((logits / temperature).softmax(-1), 1, generator=g)
        else:
            step = logits.argmax(-1, keepdim=True)
        for o, token in zip(out, step[:, 0].tolist()):
            if not o or o[-1] != 0:
                o.append(token)
    return [(bytes(o).rstrip(b"\0"), o[-1] == 0) for o in out]


# ------------------------------------------------------------------------------------------------
# 4. Training

def train(model, data, device, args):
    """Trains in place -> (steps, tokens, seconds)."""
    windows = Windows(data, device, args.seed)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95), fused=device == "cuda")
    step, tokens, start, order = 0, 0, time.perf_counter(), random.Random(args.seed)
    while True:
        seconds = time.perf_counter() - start
        done = step / args.steps if args.steps else seconds / (60 * args.minutes)
        if done >= 1:
            return step, tokens, seconds
        warm_up = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm_up * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        x, y = windows.draw(args.batch_tokens, order.choice(Windows.LENGTHS))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(x)
        logits = logits.flatten(0, 1)
        loss = F.cross_entropy(logits, y.flatten())
        small_logits = 1e-4 * torch.logsumexp(logits, -1).square().mean()
        (loss + small_logits).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens += x.numel()
        if step % 20 == 0:  # reading the loss waits for the device: keeps the clock honest
            value = loss.item()
            assert math.isfinite(value), "the loss is not finite: lower --lr"
            if step % 200 == 0 or device == "cpu":
                print(f"step {step:5d}  {100 * done:3.0f}%  loss {value:.4f}  "
                      f"{tokens / (time.perf_counter() - start) / 1e3:.0f}k bytes/s", flush=True)


@torch.no_grad()
def evaluate(model, data, device, n_windows=128):
    """Mean loss in nats per byte over fresh texts, in float32, over windows of 1024."""
    windows = Windows(data, device, 0)
    losses = []
    for first in windows.starts[:: max(1, len(windows.starts) // n_windows)][:n_windows]:
        row = windows.data[first : first + 1025].long()
        losses.append(F.cross_entropy(model(row[None, :-1])[0], row[1:]).item())
    return statistics.fmean(losses)


# ------------------------------------------------------------------------------------------------
# 5. Saving and reporting

def save_safetensors(path, tensors):
    """8 bytes: header size; the header: JSON, {name: dtype, shape, place}; then the tensors."""
    header, place = {"__metadata__": {"format": "pt"}}, 0
    for name, array in tensors.items():
        assert array.dtype == np.float16 and np.isfinite(array).all(), name
        header[name] = {"dtype": "F16", "shape": list(array.shape),
                        "data_offsets": [place, place + array.nbytes]}
        place += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            f.write(array.tobytes())


PROMPTS = ["Once upon a time", "The dragon", "Dear ", "Long ago", "One winter night", "M",
           "Every morning", "Nobody knew", "Mina the fox", "A robot named ", "\"Is it far?\"",
           "In the forest"]


def write_samples(model, path, seed):
    """Writes samples.txt: continuations of PROMPTS, then texts from byte 0 -> share and lengths."""
    lines = []

    def note(what, text, ended):
        how = "ended by itself" if ended else "did not end"
        lines.append(f"=== {what}: {len(text)} bytes, {how}\n{text}\n")

    for temperature in (0.0, 0.8):
        for i, prompt in enumerate(PROMPTS):
            (text, ended), = generate(model, [prompt.encode()], temperature, seed + i)
            note(f"{prompt!r}, temperature {temperature}", prompt + text.decode("latin-1"), ended)
    free = generate(model, [b"\0"] * 64, 1.0, seed)
    for text, ended in free[:12]:
        note("from byte 0, temperature 1", text.decode("latin-1"), ended)
    with open(path, "w", encoding="utf-8") as f:
        f.write("\n".join(lines))
    words = set(re.findall(r"[A-Za-z-]+", write_chunk((9, 1 << 20))[0].decode()))
    said = [w for text, _ in free for w in re.findall(r"[A-Za-z-]+", text.decode("latin-1"))]
    lengths = sorted(len(text) for text, _ in free)
    return {
        "samples": len(free),
        "samples_that_ended_by_themselves": sum(ended for _, ended in free),
        "sample_bytes_min_median_max": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
        "sample_words_spelled_right": round(sum(w in words for w in said) / max(1, len(said)), 4),
    }


def rewrite_readme(report):
    """Replaces what stands between the two markers of weights/README.md."""
    path = os.path.join(HERE, "..", "README.md")
    c = report["config"]
    low, mid, high = report["sample_bytes_min_median_max"]
    spelled = 100 * report["sample_words_spelled_right"]
    rows = {
        "parameters": f"{report['parameters']:,}, stored as fp16: {report['file_bytes']:,} bytes",
        "shape": f"{c['num_hidden_layers']} layers, width {c['hidden_size']}, "
                 f"{c['num_attention_heads']} heads and {c['num_key_value_heads']} KV heads of "
                 f"{c['head_dim']}, hidden {c['intermediate_size']}, "
                 f"vocabulary {c['vocab_size']}, context {c['max_position_embeddings']}, tied",
        "training": f"{report['steps']:,} steps, {report['tokens'] / 1e6:,.1f} M bytes read, "
                    f"{report['seconds']:.0f} s",
        "device": f"{report['device']}, PyTorch {report['torch']}",
        "date": report["date"],
        "command": f"`{report['command']}`",
        "corpus": f"{report['corpus_bytes'] / 1e6:,.1f} MB from the grammar, seed {report['seed']}",
        "loss on fresh texts": f"{report['loss']:.4f} nats per byte with the fp16-rounded weights, "
                               f"{report['loss_before_rounding']:.4f} before rounding",
        "loss of the grammar itself": f"{report['grammar_nats_per_byte']:.4f} nats per byte: about "
                                      "the least that any model can reach",
        f"{report['samples']} sampled texts":
            f"{report['samples_that_ended_by_themselves']} ended by themselves, at {low} to {high} "
            f"bytes (median {mid}); {spelled:.2f}% of their words are words of the grammar",
        "largest weight": f"{report['largest_weight']:.2f} (fp16 ends at 65,504)",
        "SHA-256": f"`{report['sha256'][:32]}...`",
    }
    table = "| | |\n|---|---|\n" + "".join(f"| {k} | {v} |\n" for k, v in rows.items())
    with open(path) as f:
        text = f.read()
    begin, end = "<!-- make.py writes this table -->\n", "<!-- end of the table -->\n"
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    with open(path, "w") as f:
        f.write(head + begin + table + end + tail)


def parse_args():
    p = argparse.ArgumentParser(description="Trains weights/tiny on texts of its own grammar.")
    p.add_argument("--show", type=int, metavar="N", help="print N texts of the grammar and stop")
    p.add_argument("--readme", action="store_true", help="only rewrite weights/README.md's table")
    p.add_argument("--out", default=HERE, help="directory to write to (default: beside this file)")
    p.add_argument("--device", choices=["cuda", "cpu"],
                   default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--minutes", type=float, default=2.0, help="training time limit (default 2)")
    p.add_argument("--steps", type=int, default=0, help="train this many steps instead")
    p.add_argument("--batch-tokens", type=int, help="bytes a step (default: cuda 131072, cpu 4096)")
    p.add_argument("--corpus-mb", type=int, default=48, help="MiB of training texts (default 48)")
    p.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default 0.003)")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    args.batch_tokens = args.batch_tokens or (131072 if args.device == "cuda" else 4096)
    return args


def main():
    args = parse_args()
    if args.show:
        writer = Writer(args.seed)
        print("\n---\n".join(writer.text() for _ in range(args.show)))
        return
    if args.readme:
        with open(os.path.join(HERE, "train.json")) as f:
            rewrite_readme(json.load(f))
        return
    os.makedirs(args.out, exist_ok=True)
    corpus, _ = write_corpus(args.seed, args.corpus_mb)
    fresh, entropy = write_corpus(args.seed + 1, 4)
    torch.manual_seed(args.seed)
    model = Llama().to(args.device)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{n_parameters:,} parameters, {len(corpus):,} bytes of texts, device {args.device}")
    steps, tokens, seconds = train(model, corpus, args.device, args)

    before = evaluate(model, fresh, args.device)
    tensors = {k: v.half().cpu().numpy() for k, v in model.state_dict().items()}
    weights = os.path.join(args.out, "model.safetensors")
    save_safetensors(weights, tensors)
    with open(os.path.join(args.out, "config.json"), "w") as f:
        f.write(json.dumps(CONFIG, indent=2) + "\n")
    model.load_state_dict({k: torch.from_numpy(v).float() for k, v in tensors.items()})

    with open(weights, "rb") as f:
        digest = hashlib.sha256(f.read()).hexdigest()
    report = {
        "parameters": n_parameters,
        "loss": evaluate(model, fresh, args.device),
        "loss_before_rounding": before,
        "grammar_nats_per_byte": entropy,
        "steps": steps,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": re.sub(r" --out \S+", "", " ".join(["make.py"] + sys.argv[1:])),
        "seed": args.seed,
        "corpus_bytes": len(corpus),
        "largest_weight": max(float(np.abs(t).max()) for t in tensors.values()),
        "file_bytes": os.path.getsize(weights),
        "sha256": digest,
        "config": CONFIG,
    }
    torch.set_num_threads(min(4, os.cpu_count() or 1))  # one token at a time: more would be slower
    report.update(write_samples(model.cpu(), os.path.join(args.out, "samples.txt"), args.seed))
    with open(os.path.join(args.out, "train.json"), "w") as f:
        f.write(json.dumps(report, indent=2) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "config"}, indent=2))
    if os.path.samefile(args.out, HERE):
        rewrite_readme(report)


if __name__ == "__main__":
    main()
