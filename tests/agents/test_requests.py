"""Requests of an agent's program as turns of a rollout tree, without HTTP, processes or a model."""

import importlib
import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import STYLES, tokenizer
from rows import each_row
from speech import Speaking

from rlx.agents import AgentRequests
from rlx.batch import build_token_batch, list_batch_rows
from rlx.model import ChatDialogue, Vocabulary, build_vocabulary_dialogue
from rlx.plugin import FAILED, Problem
from rlx.rollout import (
    CompletionRequest,
    LocalHost,
    RolloutOverError,
    RolloutRecorder,
    build_agent_tree,
    build_rollout_plan,
    derive_turn_seed,
    sample_rollout_trees,
)
from rlx.serving import ChatRequest, InvalidRequestError, ServedModel, TextRequest
from rlx.spec import AgentRolloutSpec, EnvironmentRolloutSpec

ROOT = Path(__file__).parents[2]
BYTES = build_vocabulary_dialogue(Vocabulary.build_bytes())
TEXTS = ("<answer>1</answer>", "<answer>2</answer>", "seventy", " <answer>3</answer>\n")
TURN = {"max_new_tokens": 30, "spans": ["answer"]}
SEED = 7


class Program:
    """Makes the requests of one program."""

    def __init__(
        self, dialogue=BYTES, *, place=0, room=100_000, prompt="Q?\n", texts=TEXTS, **set_
    ):
        options = {"function": "m:f", "max_turns": 8, "turn": TURN, **set_}
        self.plan = build_rollout_plan(AgentRolloutSpec.model_validate(options)).talk
        policy = SimpleNamespace(
            tokenizer=dialogue.tokenizer,
            dialogue=dialogue,
            end_ids=dialogue.end_ids,
            vocabulary=1000,
        )
        self.problem = Problem(id="a", prompt=prompt, fields={})
        opening = self.plan.opening(self.problem, dialogue)
        self.recorder = RolloutRecorder(self.plan, opening, SEED, place, room)
        self.agent = AgentRequests(ServedModel("policy", policy, room), self.recorder)
        self.session, self.calls = Speaking(dialogue, texts), 0

    def ask(self, body):
        kind, read = (
            (ChatRequest, self.agent.read_chat)
            if "messages" in body
            else (TextRequest, self.agent.read_text)
        )
        request = kind.model_validate({"model": "gpt", **body})
        return request, self.agent.ask(request, read(request))

    def sample(self, wanted):
        context = CompletionRequest(wanted.context.whole, None, wanted.seeds)
        (sampled,) = self.session.generate([context], self.plan.turn)
        self.calls += 1
        return self.recorder.record(wanted, sampled, self.session.dialogue, (self.calls, 0))

    def answer(self, request, wanted):
        chat = isinstance(request, ChatRequest)
        answer = (self.agent.answer_chat if chat else self.agent.answer_text)(
            request, self.sample(wanted)
        )
        return json.loads(json.dumps(answer.build_response()))

    def post(self, body):
        return self.answer(*self.ask(body))

    def chat(self, *messages, **fields):
        """The answers to messages, of the user's and the assistant's in turn if they are texts."""
        said = [
            {"role": ("user", "assistant")[n % 2], "content": m} if isinstance(m, str) else m
            for n, m in enumerate(messages)
        ]
        choices = self.post({"messages": said, **fields})["choices"]
        return [choice["message"]["content"] for choice in choices]

    def tree(self):
        return build_agent_tree(self.problem, [self.recorder])


def shape(tree):
    """Authors and texts, each with its parent."""
    return [(s.parent, s.author, s.text) for s in tree.segments]


def rows(tree):
    return [(row.turns, row.parent, row.level) for row in list_batch_rows([tree])]


# The shipped agent --------------------------------------------------------------------------------


@pytest.fixture
def guess(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "plugins" / "rlx-guess"))
    return importlib.import_module


def test_the_shipped_agent_has_the_rollouts_of_the_environment(guess, monkeypatch):
    """Its tokens, log-probabilities, spans, infos and seeds, at the same seeds."""
    agent, game, task = guess("agent"), guess("rlx_guess.game"), guess("rlx_guess.task")
    texts = [f"<answer>{n}</answer>" for n in range(1, 9)] + ["nothing"]
    problems = [task.GuessTask().problem("train", n, 3) for n in range(3)]
    options = {"num_generations": 4, "max_turns": 3, "turn": TURN}
    native = EnvironmentRolloutSpec.model_validate({"environment": {"plugin": "guess"}, **options})
    theirs = sample_rollout_trees(
        build_rollout_plan(native), problems, [SEED] * 3, Speaking(BYTES, texts), BYTES,
        LocalHost(game.Game()),
    )  # fmt: skip
    mine = []
    for problem in problems:
        played = []
        for place in range(4):
            program = Program(place=place, prompt=problem.prompt, texts=texts, **options)

            def post(url, key, body, program=program):
                return program.agent.report(body) if url.endswith("/info") else program.post(body)

            monkeypatch.setattr(agent, "post", post)
            shown = {"fields": problem.fields, "prompt": problem.prompt}
            agent.play(shown, "http://here/v1", "key")
            played.append(program.recorder)
        mine.append(build_agent_tree(problem, played))

    def list_turns(tree):
        return [replace(tree.segments[at], parent=0, kind="turn") for at in tree.policy_segments]

    assert [list_turns(tree) for tree in mine] == [list_turns(tree) for tree in theirs]
    assert len({turn.text for tree in mine for turn in list_turns(tree)}) > 9
    ours, others = build_token_batch(mine), build_token_batch(theirs)
    for name in ("token_ids", "is_own", "is_environment", "is_end", "turn_ids", "group_ids"):
        assert getattr(ours, name).equal(getattr(others, name)), name
    assert ours.behaviour_logprobs.equal(others.behaviour_logprobs)


# Dialogues ----------------------------------------------------------------------------------------


def test_a_dialogue_goes_on_from_the_sampled_tokens():
    program = Program()
    (first,) = program.chat("Q?\n")
    (second,) = program.chat("Q?\n", first, "+\n")
    program.chat("Q?\n", first, "+\n", second, "-\n")
    tree = program.tree()
    assert [(s.parent, s.author, s.turn) for s in tree.segments] == [
        (-1, "prompt", 0), (0, "policy", 1), (1, "environment", 0), (2, "policy", 2),
        (3, "environment", 0), (4, "policy", 3),
    ]  # fmt: skip
    assert rows(tree) == [((1, 3, 5), -1, 0)]
    turns = [tree.segments[at] for at in tree.policy_segments]
    assert [turn.seed for turn in turns] == [derive_turn_seed(SEED, 0, n) for n in (1, 2, 3)]
    sampled = [request.context for (request,), _ in program.session.calls]
    assert sampled == [tree.token_ids(at) for at in (0, 2, 4)]


def test_what_clients_change_of_a_message_begins_no_other_dialogue():
    """They may strip it and add fields that say nothing; another message begins another one."""
    program = Program(texts=(" <answer>3</answer>\n",))
    (said,) = program.chat("Q?\n")
    echo = {"role": "assistant", "content": f" {said.strip()}", "refusal": None, "tool_calls": None}
    program.chat("Q?\n", echo, "+\n")
    program.chat("Q?\n", "something else", "+\n")
    assert [turn.segment.turn for turn in program.recorder.turns] == [1, 2, 1]
    assert rows(program.tree()) == [((1, 3), -1, 0), ((5,), -1, 0)]


def test_a_message_that_nobody_sampled_is_context_below_the_turn_before():
    program = Program()
    (first,) = program.chat("Q?\n")
    program.chat("Q?\n", first, "+\n", "as I said", "-\n")
    last = program.tree().segments[2]
    assert (last.author, last.parent, last.text) == ("environment", 1, "+\n\n\nas I said\n\n-\n")


def test_where_a_program_forks_its_history_every_turn_is_learned_once():
    """Three choices of a second turn, the second of which goes on."""
    program = Program()
    (first,) = program.chat("Q?\n")
    best = program.chat("Q?\n", first, "+\n", n=3)
    program.chat("Q?\n", first, "+\n", best[1], "-\n")
    program.agent.report({"turn": 1, "value": 1.0})
    program.agent.report({"won": True})
    tree = program.tree()
    assert [(s.parent, s.author, s.turn) for s in tree.segments] == [
        (-1, "prompt", 0), (0, "policy", 1), (1, "prompt", 0), (2, "policy", 2), (2, "policy", 2),
        (4, "environment", 0), (5, "policy", 3), (2, "policy", 2),
    ]  # fmt: skip
    assert rows(tree) == [((1,), -1, 0), ((3,), 1, 1), ((4, 6), 1, 1), ((7,), 1, 1)]
    infos = [dict(tree.segments[at].info) for at in tree.policy_segments]
    won = {"won": True}
    assert infos == [{"value": 1.0, **won}, won, {}, won, won]
    batch = build_token_batch([tree])
    assert int(batch.is_own.sum()) == sum(len(t.segment.token_ids) for t in program.recorder.turns)
    assert batch.group_ids.tolist() == [0, 1, 1, 1]


def test_the_order_of_parallel_requests_changes_nothing():
    """Requests that differ in their messages, and two that do not."""
    bodies = [
        {"messages": [{"role": "user", "content": text}]} for text in ("Q?\n", "R?\n", "Q?\n", "S")
    ]
    trees = set()
    for order in permutations(range(len(bodies))):
        program = Program()
        asked = [program.ask(bodies[n]) for n in order]
        for pair in reversed(asked):
            program.answer(*pair)
        trees.add(repr(program.tree().segments))
    assert len(trees) == 1
    seeds = [turn.segment.seed for turn in program.recorder.turns]
    assert len(set(seeds)) == len(seeds)
    assert derive_turn_seed(SEED, 0, 1) in seeds


def test_a_request_that_is_given_up_leaves_no_trace():
    program = Program()
    _, wanted = program.ask({"messages": [{"role": "user", "content": "Q?\n"}]})
    program.recorder.withdraw(wanted)
    assert program.recorder.openings == []
    request, again = program.ask({"messages": [{"role": "user", "content": "Q?\n"}]})
    assert again.seeds == wanted.seeds
    program.answer(request, again)
    continued = program.agent.read_chat(request)
    found = program.recorder.find_repeated(continued.after, continued.prompt, 1)
    assert found == program.recorder.turns
    assert program.recorder.find_repeated(continued.after, continued.prompt, 2) is None
    program.recorder.forget(again)
    assert program.recorder.openings == program.recorder.turns == []
    assert program.ask({"messages": [{"role": "user", "content": "Q?\n"}]})[1].seeds == again.seeds


def test_texts_and_tokens_go_on_from_what_was_sampled():
    program = Program()
    first = program.post({"prompt": "Q?\n", "return_token_ids": True})["choices"][0]
    program.post({"prompt": f"Q?\n{first['text']}+\n"})
    ids = [*first["prompt_token_ids"], *first["token_ids"], *BYTES.encode("-")]
    program.post({"prompt": ids})
    tree = program.tree()
    assert [(s.parent, s.author, s.turn) for s in tree.segments] == [
        (-1, "prompt", 0), (0, "policy", 1), (1, "prompt", 0), (2, "policy", 2),
        (1, "prompt", 0), (4, "policy", 2),
    ]  # fmt: skip
    assert [tree.segments[at].text for at in (0, 2, 4)] == ["Q?\n", "+\n", "-"]
    assert tree.segments[1].seed == derive_turn_seed(SEED, 0, 1)


def test_stop_strings_and_limits_are_those_of_the_experiment_or_less():
    program = Program(turn={**TURN, "stop": ["</answer>"]}, texts=("<answer>1</answer>",))
    body = {"messages": [{"role": "user", "content": "Q?\n"}]}
    (said,) = program.chat("Q?\n", stop=["</answer>"], temperature=0.3)
    assert said == "<answer>1"
    program.chat("Q?\n", said, "+\n")
    assert [turn.segment.turn for turn in program.recorder.turns] == [1, 2]
    assert program.ask({**body, "max_tokens": 5})[1].max_new_tokens == 5
    assert program.ask({**body, "max_completion_tokens": 500})[1].max_new_tokens == 30
    request = ChatRequest.model_validate({"model": "m", "temperature": 0.3, "top_p": 1, **body})
    assert program.agent.list_ignored(request) == ["temperature 0.3: rollout.turn.temperature is 1"]


@each_row(
    "body, message",
    [
        ({"stop": "x"}, "add 'x' to rollout.turn.stop"),
        ({"logprobs": True}, "has no log-probabilities"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "no chat template"),
        ({"messages": None, "prompt": ["a", "b"]}, "has one prompt"),
        ({"messages": None, "prompt": "a", "echo": True}, "repeats no prompt"),
        ({"messages": None, "prompt": [5000]}, "no token 5000"),
    ],
)
def test_requests_that_cannot_be_answered(body, message):
    asked = {"messages": [{"role": "user", "content": "Q?\n"}], **body}
    with pytest.raises(InvalidRequestError, match=message):
        Program().ask({name: value for name, value in asked.items() if value is not None})


# Ends ---------------------------------------------------------------------------------------------


def test_after_its_last_turn_a_rollout_is_over():
    """What the program goes on with is shown, as an environment's last observation is."""
    program = Program(max_turns=2)
    (first,) = program.chat("Q?\n")
    (second,) = program.chat("Q?\n", first, "+\n")
    with pytest.raises(RolloutOverError, match="has had its 2 turns"):
        program.chat("Q?\n", first, "+\n", second, "-\n")
    assert shape(program.tree())[2:] == [
        (1, "environment", "+\n"), (2, "policy", second), (3, "environment", "-\n"),
    ]  # fmt: skip


def test_a_dialogue_ends_before_the_turn_that_does_not_fit():
    program = Program(room=60)
    (first,) = program.chat("Q?\n")
    with pytest.raises(RolloutOverError, match="60 tokens, but the dialogue has"):
        program.chat("Q?\n", first, "+" * 40)
    assert program.recorder.fault is None
    assert program.tree().segments[-1].text == "+" * 40
    program = Program(room=60)
    with pytest.raises(RolloutOverError):
        program.chat("Q" * 40)
    assert program.recorder.fault == "its first request of 41 tokens leaves no room"


def test_a_rollout_with_a_fault_is_dropped_whole():
    program = Program()
    (first,) = program.chat("Q?\n")
    program.chat("Q?\n", first, "+\n", n=2)
    program.chat("other")
    program.recorder.fault = "exit code 1"
    segments = program.tree().segments
    faulty = [s.parent for s in segments if "fault" in s.info]
    assert [segments[at].kind for at in faulty] == [FAILED] * 3
    assert {s.info["fault"] for s in segments if "fault" in s.info} == {"exit code 1"}
    assert [s.kind for s in segments if s.author == "policy"].count("turn") == 1


def test_a_program_that_asked_for_nothing_has_a_fault_and_no_turn():
    program = Program()
    program.recorder.fault = "it made no request that could be answered"
    root, fault = program.tree().segments
    assert (root.text, fault.parent) == ("Q?\n", 0)
    assert fault.info == {
        "fault": "it made no request that could be answered",
        "on_error": "drop_sample",
        "by": "agent",
    }


# Reports ------------------------------------------------------------------------------------------


def test_turns_are_named_by_number_by_response_and_by_choice():
    program = Program()
    answer = program.post({"messages": [{"role": "user", "content": "Q?\n"}], "n": 2})
    program.agent.report({"turn": answer["id"], "a": 1})
    program.agent.report({"turn": [answer["id"], 1], "b": [1, {"c": None}]})
    assert [turn.segment.info for turn in program.recorder.turns] == [
        {"a": 1},
        {"a": 1, "b": [1, {"c": None}]},
    ]


@each_row(
    "report, message",
    [
        ([1], "gave list as info"),
        ({"x": float("nan")}, "not plain JSON"),
        ({"x": "y" * 1_000_001}, "characters"),
        ({"turn": 2, "x": 1}, "there is no turn 2"),
        ({"turn": True, "x": 1}, "there is no turn True"),
        ({"turn": "chatcmpl-0", "x": 1}, "there is no turn 'chatcmpl-0'"),
        ({"turn": ["chatcmpl-0", 0], "x": 1}, "there is no turn"),
        ({"turn": 1, "x": 1}, "2 turns have the number 1: name the response's id"),
    ],
)
def test_reports_that_are_refused(report, message):
    program = Program()
    program.chat("Q?\n", n=2)
    with pytest.raises(InvalidRequestError, match=message):
        program.agent.report(report)


# Chat templates -----------------------------------------------------------------------------------


@each_row("name", STYLES)
def test_one_message_after_a_turn_is_an_observation(name):
    tok = tokenizer(STYLES[name])
    dialogue = ChatDialogue(tok, (tok.eos_token_id,))
    for turn in (dialogue.encode("17"), (*dialogue.encode("17"), dialogue.end_ids[0])):
        said = [{"role": "user", "content": "+1"}]
        assert dialogue.follow_chat(said, turn) == dialogue.reply("+1", turn)


def test_a_chat_goes_on_by_what_the_template_writes_after_the_turn():
    tok = tokenizer(STYLES["chatml"])
    dialogue = ChatDialogue(tok, (tok.eos_token_id,))
    program = Program(dialogue, prompt="2 + 2", texts=("seventeen",))
    (first,) = program.chat("2 + 2")
    program.chat("2 + 2", first, "no")
    tree = program.tree()
    assert rows(tree) == [((1, 3), -1, 0)]
    assert tree.segments[1].seed == derive_turn_seed(SEED, 0, 1)
    turn = tree.segments[1].token_ids
    assert tree.segments[2].token_ids == dialogue.reply("no", turn)
