"""Make the sample data: short stories in English and Chinese that a small model can learn. Needs no network.

    python tools/make_sample_data.py
    python tools/make_sample_data.py --print text --number 4
    python tools/make_sample_data.py --print json > stories.jsonl

The first command writes stories, trains a vocabulary on them, and creates data/sample/{corpus.jsonl, tokenizer.json,
gpt2_text_document.bin, .idx, .meta.json}: 10,000 stories, 4.6 MB, in a few seconds. It returns immediately if all files
are up to date, and several processes may run it at once. The other commands only print stories;
tools/preprocess_data.py reads the output of --print json.

A story follows one of ten plots. Its people, things and places are drawn once per story; each beat of the plot is one
of a few sentences with the same meaning. A model of a million parameters therefore learns the characters and plots
within minutes on a CPU.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import os
import random
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line

import orjson  # noqa: E402
import tokenizers  # noqa: E402

from megatron import files, log, tokenizer  # noqa: E402
from megatron.data import preprocess  # noqa: E402
from megatron.data.indexed_dataset import IndexedDataset  # noqa: E402
from megatron.errors import DataError, exit_code  # noqa: E402
from megatron.tokenizer import train  # noqa: E402
from megatron.tokenizer.identity import is_same  # noqa: E402

DATA_VERSION = "2"
"""Version of the data. Increase it when the data changes, so that existing data is created again."""
VOCAB_SIZE = 2400
PREFIX = "gpt2_text_document"

Beats = Sequence[Sequence[str]]
"""The beats of a plot, in order; one sentence is drawn for each beat. {a} is the hero, {b} the friend."""

# English. A name always belongs to the same animal and has the same pronoun, he or she.

PEOPLE = {
    "Mia": "cat she",
    "Tom": "fox he",
    "Lily": "rabbit she",
    "Ben": "bear he",
    "Ella": "mouse she",
    "Max": "dog he",
    "Nora": "duck she",
    "Sam": "frog he",
    "Rosa": "hen she",
    "Leo": "lion he",
    "Ivy": "owl she",
    "Otto": "turtle he",
}
PRONOUNS = {"she": ("she", "her", "her"), "he": ("he", "him", "his")}

WORDS: Mapping[str, Sequence[str]] = {
    "toy": ("red ball", "blue kite", "little boat", "yellow hat", "wooden horse", "silver bell", "green cup", "doll"),
    "food": ("bread", "apples", "soup", "cake", "cheese", "nuts", "honey", "berries"),
    "near": ("in the garden", "by the river", "in the forest", "on the hill", "near the old tree", "in the village"),
    "under": ("under the bed", "behind the door", "in the box", "under the table", "behind the house", "in the basket"),
    "there": ("under the big tree", "in the tall grass", "next to the well", "behind the stone", "on the bridge"),
    "time": ("morning", "afternoon", "evening", "day"),
    "season": ("spring", "summer", "autumn", "winter"),
    "weather": ("warm and sunny", "cold and windy", "grey and quiet", "bright and clear"),
    "skill": ("swim", "sing", "dance", "count", "read", "climb"),
    "plant": ("flower", "apple tree", "pumpkin", "rose"),
    "number": ("two", "three", "four", "five"),
}

OPENINGS: Beats = (
    (
        "Once upon a time there was {akind} named {a}.",
        "There was once a little {kind}. {His} name was {a}.",
        "{a} was a little {kind} who lived {near}.",
    ),
    (
        "{a} lived {near} with {his} family.",
        "{He} had a good friend, {b} the {bkind}.",
        "{His} best friend was {b} the {bkind}.",
    ),
    ("It was {season}, and the day was {weather}.", "One {time} it was {weather}.", "The {time} was {weather}."),
)

PLOTS: Mapping[str, Beats] = {
    "lost": (
        ("{a} had a {toy} and played with it every day.", "{a} had a {toy}. {He} loved it very much."),
        ("But today the {toy} was gone.", "Then {he} could not find the {toy}."),
        ('"Where is my {toy}?" {he} asked.', '"Oh no, my {toy}!" said {a}.'),
        ("{He} looked {under}, but it was not there.", "{a} looked {under}. There was nothing."),
        ("{b} heard {him} and came to help.", '"I will help you," said {b} the {bkind}.'),
        ("They looked for a long time.", "They walked and looked everywhere."),
        ("At last {b} found the {toy} {there}.", "The {toy} was {there}. {b} saw it first."),
        ('"Thank you, {b}," said {a}. "You are a good friend."', "{a} was so happy that {he} danced."),
    ),
    "hungry": (
        ("{b} came to the house of {a} and was very hungry.", "{a} met {b} {near}. {b} was very hungry."),
        ('"I have nothing to eat," said {b}.', '"Do you have some {food}?" asked {b}.'),
        ("{a} had only a little {food}.", "{a} had some {food} in {his} basket."),
        ('"We can share it," said {a}.', '"Come in and eat with me," said {a}.'),
        ("They sat down and ate the {food} together.", "So they shared the {food}, and it was very good."),
        (
            "The next day {b} came back with {number} baskets of {food}.",
            "Later {b} brought {a} {number} big bags of {food}.",
        ),
        ("{a} learned that a friend who shares is never poor.", "Now they had enough for the whole winter."),
    ),
    "rain": (
        ("{a} went for a walk {near}.", "{a} and {b} played {near}."),
        ("Suddenly it began to rain.", "Then dark clouds came, and it rained hard."),
        ('"I am all wet!" said {a}.', "{a} was cold and wet."),
        ("{He} ran to a place {there}, but it was too small.", "{He} looked for a dry place {there}."),
        ("{b} had a big umbrella.", "{b} the {bkind} opened a big umbrella."),
        ('"Come here, there is room for two," said {b}.', '"Stand next to me," said {b}.'),
        ("They waited until the rain stopped.", "They told each other stories until the sun came out."),
        ("Then they saw a rainbow over the river.", "Then they jumped into every puddle on the way home."),
    ),
    "broken": (
        ("{b} had a new {toy}, and {a} wanted to play with it.", "{a} played with the {toy} of {b}."),
        ("But {a} let it fall, and it broke.", "Then the {toy} fell on the floor and broke."),
        ("{a} was afraid and hid the {toy} {under}.", "{a} put the {toy} {under} and said nothing."),
        ('"Have you seen my {toy}?" asked {b}.', "{b} looked for the {toy} and was sad."),
        ('"I am sorry. I broke it," said {a}.', "{a} began to cry and told {b} the truth."),
        ('"Let us mend it together," said {b}.', "{b} was not angry. They took some glue."),
        ("Soon the {toy} was as good as new.", "In the {time} the {toy} was whole again."),
        ("{a} was glad that {he} had told the truth.", "From then on {a} always told the truth."),
    ),
    "seed": (
        ("{a} found a small seed {there}.", "{b} gave {a} a small seed."),
        ("{He} put it into the ground {near}.", "{He} made a hole and put the seed in."),
        ("Every day {he} gave it water.", "{a} gave it water every {time}."),
        ("But nothing came, and {a} was sad.", "Many days went by, and nothing happened."),
        ('"You must wait," said {b}. "Good things need time."', '"Do not worry, it is only sleeping," said {b}.'),
        ("In {season} there was a little green leaf.", "Then one {time} {he} saw a green leaf."),
        ("It grew and grew until it was a big {plant}.", "The leaf became a beautiful {plant}."),
        ("All the friends came to see the {plant}.", "{a} and {b} sat under it and were happy."),
    ),
    "gift": (
        ("It was the birthday of {b}.", "Tomorrow was the birthday of {b}."),
        ("{a} wanted to give {b} a gift, but {he} had no money.", "{a} thought about a gift for a long time."),
        ("So {he} made a {toy} with {his} own hands.", "{He} worked all {time} and made a {toy}."),
        ("{He} put it into a box with a ribbon.", "{a} hid it {under} until the party."),
        ("All the friends came and brought {food}.", "At the party they ate {food} and sang."),
        ("{b} opened the box and saw the {toy}.", '"What is it?" asked {b} and opened the box.'),
        ('"This is the best gift of all," said {b}.', "{b} smiled and played with it all day."),
    ),
    "dark": (
        ("{a} was afraid of the dark.", "At night {a} could not sleep, because it was dark."),
        ("{He} heard a strange sound {under}.", "There was a sound {there}."),
        ('"Who is there?" {he} asked.', '"Help, there is a monster!" {he} cried.'),
        ("{b} came with a small light.", "{b} the {bkind} woke up and lit a lamp."),
        ("They looked {under} and laughed.", "They went to look, hand in hand."),
        ("It was only the wind.", "It was only the {toy}, which had fallen down."),
        ('"You see, the dark is not bad," said {b}.', "{a} was not afraid any more."),
        ("Then they both slept until the morning.", "That night {he} slept very well."),
    ),
    "river": (
        ("{a} wanted to go to the other side of the river.", "{a} and {b} came to a wide river."),
        ("There was no bridge, and the water was deep.", "The bridge was broken."),
        ('"I cannot swim," said {a}.', '"How can we get over it?" asked {a}.'),
        ("{b} had an idea.", '"I know what we can do," said {b}.'),
        ("They took some wood and made a little boat.", "They put {number} big stones into the water."),
        ("Slowly they came to the other side.", "Step by step they went over the river."),
        ("There they found {food} and had a picnic.", "On the other side they found a {toy}."),
        ('"Together we can do anything," said {a}.', "{a} and {b} were very proud."),
    ),
    "learn": (
        ("{a} wanted to learn to {skill}.", "All the others could {skill}, but {a} could not."),
        ("{He} tried, but it was too hard.", "{He} tried {number} times, and each time it went wrong."),
        ('"I will never learn it," said {a}.', "{a} sat down {there} and cried."),
        ('"Do not give up," said {b}. "I will show you."', '{b} saw it and said, "Let us try together."'),
        ("They met every {time} {near}.", "Each day they worked a little."),
        ("After {number} weeks {a} could {skill} well.", "One {time} {a} could {skill} as well as {b}."),
        ('"Look at me!" {he} said.', "All the animals clapped their hands."),
        ("{a} was proud, and {b} was proud of {him}.", "Then {he} showed a small child how to {skill}."),
    ),
    "race": (
        ("{a} and {b} wanted to know who was faster.", '"I am the fastest of all," said {b}.'),
        ("So they ran a race to the old tree.", "They ran from the bridge to the hill."),
        ("At first {b} was far ahead.", "{b} ran fast and laughed at {a}."),
        ("But then {b} fell and hurt a foot.", "Then {b} stopped and could not go on."),
        ("{a} could have won now.", "{a} saw it and thought for a moment."),
        ("But {he} stopped and helped {b} up.", "But {he} went back to {b}."),
        ("They came to the end together.", "So there was no winner, and both were glad."),
        ('"You are the real winner," said {b}.', "{b} never laughed at {a} again."),
    ),
}
CLOSINGS: Beats = (
    (
        "The end.",
        "And so they stayed friends for ever.",
        "It was a good day.",
        "In the evening they went home and were happy.",
    ),
)

# Chinese: the same plots, written independently.

ZH_PEOPLE = {
    "咪咪": "小猫 她",
    "阿福": "小狐狸 他",
    "白白": "小兔子 她",
    "大力": "小熊 他",
    "米粒": "小老鼠 她",
    "旺旺": "小狗 他",
    "丫丫": "小鸭子 她",
    "呱呱": "小青蛙 他",
    "花花": "小母鸡 她",
    "金金": "小狮子 他",
    "思思": "小猫头鹰 她",
    "稳稳": "小乌龟 他",
}
ZH_WORDS: Mapping[str, Sequence[str]] = {
    "toy": ("红色的球", "蓝色的风筝", "小木船", "黄帽子", "木马", "银铃铛", "绿杯子", "布娃娃"),
    "food": ("面包", "苹果", "热汤", "蛋糕", "奶酪", "坚果", "蜂蜜", "草莓"),
    "near": ("花园里", "小河边", "森林里", "山坡上", "老树旁边", "村子里"),
    "under": ("床底下", "门后面", "箱子里", "桌子底下", "房子后面", "篮子里"),
    "there": ("大树下面", "草丛里", "水井旁边", "石头后面", "小桥上"),
    "time": ("早上", "下午", "晚上"),
    "season": ("春天", "夏天", "秋天", "冬天"),
    "weather": ("阳光很暖和", "风很大，也很冷", "天空很安静", "天气很晴朗"),
    "skill": ("游泳", "唱歌", "跳舞", "数数", "认字", "爬树"),
    "plant": ("花", "苹果树", "南瓜", "玫瑰"),
    "number": ("两", "三", "四", "五"),
}
ZH_OPENINGS: Beats = (
    ("从前，有一只{kind}，名字叫{a}。", "{near}住着一只{kind}，{he}叫{a}。", "{a}是一只可爱的{kind}。"),
    ("{a}和家人一起住在{near}。", "{he}有一个好朋友，叫{b}。", "{he}最好的朋友是{bkind}{b}。"),
    ("那是一个{season}，{weather}。", "一天{time}，{weather}。", "这一天，{weather}。"),
)
ZH_PLOTS: Mapping[str, Beats] = {
    "lost": (
        ("{a}有一个{toy}，每天都带着它玩。", "{a}有一个{toy}，{he}非常喜欢它。"),
        ("可是今天，{toy}不见了。", "后来，{he}找不到{toy}了。"),
        ("“我的{toy}在哪里？”{he}问。", "“哎呀，我的{toy}！”{a}说。"),
        ("{he}看了看{under}，那里没有。", "{a}找了{under}，什么也没有。"),
        ("{b}听见了，就来帮忙。", "“我来帮你。”{b}说。"),
        ("他们找了很久。", "他们一边走，一边到处找。"),
        ("最后，{b}在{there}找到了{toy}。", "{toy}就在{there}，{b}先看见了它。"),
        ("“谢谢你，{b}。”{a}说，“你真是我的好朋友。”", "{a}高兴得跳起舞来。"),
    ),
    "hungry": (
        ("{b}来到{a}的家，肚子很饿。", "{a}在{near}遇见了{b}，{b}的肚子很饿。"),
        ("“我没有东西吃。”{b}说。", "“你有{food}吗？”{b}问。"),
        ("{a}只有一点点{food}。", "{a}的篮子里有一些{food}。"),
        ("“我们一起吃吧。”{a}说。", "“进来和我一起吃吧。”{a}说。"),
        ("他们坐下来，一起吃{food}。", "他们分着吃了{food}，味道好极了。"),
        ("第二天，{b}带来了{number}篮{food}。", "后来，{b}送给{a}{number}大袋{food}。"),
        ("{a}明白了，愿意分享的人永远不会穷。", "现在，他们整个冬天都够吃了。"),
    ),
    "rain": (
        ("{a}去{near}散步。", "{a}和{b}在{near}玩。"),
        ("忽然下起雨来。", "这时乌云来了，雨下得很大。"),
        ("“我全身都湿了！”{a}说。", "{a}又冷又湿。"),
        ("{he}跑到{there}，可是那里太小了。", "{he}在{there}找不到干的地方。"),
        ("{b}有一把大雨伞。", "{bkind}{b}打开了一把大雨伞。"),
        ("“过来吧，这里够两个人站。”{b}说。", "“站到我身边来。”{b}说。"),
        ("他们一起等到雨停。", "他们讲着故事，一直等到太阳出来。"),
        ("后来，他们看见河上有一道彩虹。", "回家的路上，他们跳进每一个水坑。"),
    ),
    "broken": (
        ("{b}有一个新的{toy}，{a}也想玩。", "{a}在玩{b}的{toy}。"),
        ("可是{a}没拿好，它掉下来摔坏了。", "忽然，{toy}掉在地上摔坏了。"),
        ("{a}很害怕，把{toy}藏在{under}。", "{a}把{toy}放在{under}，什么也没说。"),
        ("“你看见我的{toy}了吗？”{b}问。", "{b}到处找{toy}，心里很难过。"),
        ("“对不起，是我弄坏的。”{a}说。", "{a}哭了，把真话告诉了{b}。"),
        ("“我们一起来修好它吧。”{b}说。", "{b}没有生气，他们拿来了胶水。"),
        ("很快，{toy}就和新的一样了。", "到了{time}，{toy}又完整了。"),
        ("{a}很高兴自己说了真话。", "从那以后，{a}总是说真话。"),
    ),
    "seed": (
        ("{a}在{there}找到一颗小种子。", "{b}送给{a}一颗小种子。"),
        ("{he}把它种在{near}。", "{he}挖了一个洞，把种子放进去。"),
        ("{he}每天都给它浇水。", "每天{time}，{a}都给它浇水。"),
        ("可是什么也没有长出来，{a}很难过。", "过了很多天，什么也没有发生。"),
        ("“你要等一等。”{b}说，“好东西需要时间。”", "“别担心，它只是在睡觉。”{b}说。"),
        ("到了{season}，长出了一片小绿叶。", "有一天{time}，{he}看见一片绿叶。"),
        ("它长啊长，长成了一棵大{plant}。", "小绿叶变成了美丽的{plant}。"),
        ("朋友们都来看{plant}。", "{a}和{b}坐在旁边，非常快乐。"),
    ),
    "gift": (
        ("今天是{b}的生日。", "明天就是{b}的生日。"),
        ("{a}想送{b}一个礼物，可是{he}没有钱。", "{a}想了很久，要送什么礼物。"),
        ("于是{he}自己动手做了一个{toy}。", "{he}忙了一个{time}，做了一个{toy}。"),
        ("{he}把它放进一个漂亮的盒子。", "{a}先把它藏在{under}。"),
        ("朋友们都来了，还带来了{food}。", "生日会上，大家一起吃{food}，一起唱歌。"),
        ("{b}打开盒子，看见了{toy}。", "“这是什么？”{b}问，然后打开了盒子。"),
        ("“这是最好的礼物。”{b}说。", "{b}笑了，玩了一整天。"),
    ),
    "dark": (
        ("{a}很怕黑。", "天黑了，{a}睡不着。"),
        ("{he}听见{under}有奇怪的声音。", "{there}有一个声音。"),
        ("“谁在那里？”{he}问。", "“救命，有怪物！”{he}喊。"),
        ("{b}拿着一盏小灯来了。", "{bkind}{b}醒了，点亮了灯。"),
        ("他们看了看{under}，都笑了。", "他们手拉着手去看。"),
        ("原来只是风。", "原来只是{toy}掉下来了。"),
        ("“你看，黑夜并不可怕。”{b}说。", "{a}再也不害怕了。"),
        ("然后他们一直睡到天亮。", "那天晚上，{he}睡得很香。"),
    ),
    "river": (
        ("{a}想到小河的对面去。", "{a}和{b}来到一条大河边。"),
        ("河上没有桥，水很深。", "桥坏了，过不去。"),
        ("“我不会游泳。”{a}说。", "“我们怎么过去呢？”{a}问。"),
        ("{b}想出了一个好主意。", "“我知道该怎么办。”{b}说。"),
        ("他们用木头做了一只小船。", "他们在水里放了{number}块大石头。"),
        ("他们慢慢地到了对面。", "他们一步一步地走过了河。"),
        ("他们在那里找到了{food}，一起野餐。", "在对面，他们找到了一个{toy}。"),
        ("“我们在一起，什么都能做到。”{a}说。", "{a}和{b}都很自豪。"),
    ),
    "learn": (
        ("{a}想学{skill}。", "别人都会{skill}，只有{a}不会。"),
        ("{he}试了试，可是太难了。", "{he}试了{number}次，每次都不行。"),
        ("“我永远也学不会。”{a}说。", "{a}坐在{there}哭了。"),
        ("“不要放弃。”{b}说，“我来教你。”", "{b}看见了，说：“我们一起来试试。”"),
        ("他们每天{time}在{near}练习。", "他们每天都练习一会儿。"),
        ("{number}个星期以后，{a}学会了{skill}。", "有一天，{a}{skill}和{b}一样好了。"),
        ("“你们看我！”{he}说。", "所有的动物都为{he}鼓掌。"),
        ("{a}很自豪，{b}也为{he}高兴。", "后来，{he}也教别的小动物{skill}。"),
    ),
    "race": (
        ("{a}和{b}想知道谁跑得快。", "“我跑得最快。”{b}说。"),
        ("于是他们比赛，看谁先跑到老树下。", "他们从小桥跑向山坡。"),
        ("开始的时候，{b}跑在前面。", "{b}跑得很快，还笑话{a}。"),
        ("可是后来{b}摔倒了，脚很疼。", "后来{b}停下来，跑不动了。"),
        ("现在{a}可以赢了。", "{a}看见了，想了一想。"),
        ("可是{he}停下来，把{b}扶起来。", "可是{he}跑回{b}的身边。"),
        ("他们一起到了终点。", "没有人输，也没有人赢，大家都很高兴。"),
        ("“你才是真正的冠军。”{b}说。", "{b}再也不笑话{a}了。"),
    ),
}
ZH_CLOSINGS: Beats = (
    ("故事讲完了。", "从此，他们永远是好朋友。", "这真是美好的一天。", "晚上，他们高高兴兴地回家了。"),
)


def stories(num_stories: int, seed: int = 1234) -> Iterator[str]:
    """Yield ``num_stories`` stories, alternately in English and Chinese, the same on every machine for a seed."""
    rng = random.Random(seed)
    for story_idx in range(num_stories):
        yield make_chinese_story(rng) if story_idx % 2 else make_english_story(rng)


def chinese_words() -> set[str]:
    """Return the names, animals, things and places of the Chinese stories."""
    animals = (animal.split()[0] for animal in ZH_PEOPLE.values())
    return {*ZH_PEOPLE, *animals, *(word for words in ZH_WORDS.values() for word in words)}


def make_english_story(rng: random.Random) -> str:
    """Return an English story of one paragraph."""
    (hero, hero_traits), (friend, friend_traits) = (
        (name, PEOPLE[name].split()) for name in rng.sample(list(PEOPLE), 2)
    )
    he, him, his = PRONOUNS[hero_traits[1]]
    words = {
        "a": hero,
        "kind": hero_traits[0],
        "b": friend,
        "bkind": friend_traits[0],
        "he": he,
        "him": him,
        "his": his,
    }
    article = "an" if hero_traits[0][0] in "aeiou" else "a"
    words |= {"He": he.title(), "His": his.title(), "akind": f"{article} {hero_traits[0]}"}
    return " ".join(_sentences(rng, words, WORDS, OPENINGS, PLOTS, CLOSINGS))


def make_chinese_story(rng: random.Random) -> str:
    """Return a Chinese story of one paragraph."""
    (hero, hero_traits), (friend, friend_traits) = (
        (name, ZH_PEOPLE[name].split()) for name in rng.sample(list(ZH_PEOPLE), 2)
    )
    words = {"a": hero, "kind": hero_traits[0], "b": friend, "bkind": friend_traits[0], "he": hero_traits[1]}
    return "".join(_sentences(rng, words, ZH_WORDS, ZH_OPENINGS, ZH_PLOTS, ZH_CLOSINGS))


def _sentences(
    rng: random.Random,
    people: Mapping[str, str],
    choices_of_slot: Mapping[str, Sequence[str]],
    openings: Beats,
    plots: Mapping[str, Beats],
    closings: Beats,
) -> Iterator[str]:
    words = {**people, **{slot: rng.choice(choices) for slot, choices in choices_of_slot.items()}}
    plot = plots[rng.choice(list(plots))]
    for beat in (*openings, *plot, *closings):
        yield rng.choice(beat).format_map(words)


CHINESE_WORDS = re.compile("|".join(sorted(chinese_words(), key=len, reverse=True)))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "data" / "sample", help="folder (default: data/sample)")
    parser.add_argument("--number", type=int, default=10_000, help="number of stories (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the stories (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8), help="encoding processes")
    parser.add_argument(
        "--print", choices=("text", "json"), help='only print the stories; json: lines of {"text": ...}'
    )
    args = parser.parse_args(argv)
    if args.number < 1:
        parser.error(f"--number must be at least 1, got {args.number}")
    return args


def data_key(documents: list[str], vocab_size: int) -> str:
    """Return a key that changes if the documents or their processing change."""
    digest = hashlib.sha256(f"{DATA_VERSION}:{vocab_size}:{tokenizers.__version__}".encode())
    for text in documents:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def separate_words(text: str) -> str:
    """Put the Chinese names and things in ``text`` on separate lines, for training the vocabulary.

    Chinese has no spaces, so merges could cross the boundary of a name, whose tokens would then depend on the context.
    """
    return CHINESE_WORDS.sub(r"\n\g<0>\n", text)


def is_up_to_date(output: Path, key: str) -> bool:
    """Return True if ``output`` contains complete data that were made for ``key``."""
    try:
        sidecar = IndexedDataset(output / PREFIX).sidecar
        identity = tokenizer.build(tokenizer_path=output / "tokenizer.json").identity
        return (output / "key").read_text() == key and sidecar is not None and is_same(sidecar.tokenizer, identity)
    except (OSError, DataError):
        return False


def make_data(output: Path, documents: list[str], key: str, vocab_size: int, num_workers: int) -> None:
    """Write all files. The key is written last, so that an interrupted call is detected."""
    (output / "key").unlink(missing_ok=True)
    corpus, vocabulary = output / "corpus.jsonl", output / "tokenizer.json"
    files.replace_bytes(corpus, b"".join(orjson.dumps({"text": text}) + b"\n" for text in documents))
    log.info(
        f"training a vocabulary of {vocab_size} on {len(documents)} documents, {corpus.stat().st_size / 1e6:.1f} MB"
    )
    files.replace_bytes(vocabulary, train.train_bpe(map(separate_words, documents), vocab_size))
    job = preprocess.Job(
        inputs=[corpus],
        output_prefix=str(output / PREFIX),
        make_tokenizer=functools.partial(tokenizer.build, tokenizer_path=vocabulary),
        num_workers=num_workers,
    )
    summary = preprocess.run(job)
    files.replace_bytes(output / "key", key.encode())
    log.info(f"{output}: {summary.num_documents} documents, {summary.num_tokens} tokens")


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Allow only one process at a time to work in ``folder``; the lock is released when its process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info(f"waiting for another process that creates {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def print_stories(num_stories: int, seed: int, output_format: str) -> None:
    """Write stories to standard output, as text or as lines of JSON."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may stop early, as head does
    for story_idx, story in enumerate(stories(num_stories, seed)):
        if output_format == "json":
            sys.stdout.write(orjson.dumps({"text": story}).decode() + "\n")
        else:
            sys.stdout.write(("\n" if story_idx else "") + story + "\n")


def main(argv: list[str] | None = None) -> int:
    """Create the data if it is not up to date; return the exit code."""
    args = parse_args(argv)
    if args.print:
        print_stories(args.number, args.seed, args.print)
        return 0
    try:
        documents = list(stories(args.number, args.seed))
        key = data_key(documents, args.vocab_size)
        with lock_folder(args.output):
            if is_up_to_date(args.output, key):
                log.info(f"{args.output} is up to date")
            else:
                make_data(args.output, documents, key, args.vocab_size, args.workers)
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
