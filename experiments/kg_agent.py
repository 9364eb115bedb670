"""An agent that asks the graph of `kg.yaml` over OpenAI's interface: pip install openai."""

from openai import OpenAI

from rlx.plugin import Action
from rlx_plugins.kg.environment import KgEnvironment

TURNS = 4
GRAPH = KgEnvironment(limit=8, order="shuffled", hints=False)
GRAPH.data()  # reads it once, before the programs of a step are forked
CLIENT = OpenAI(base_url="http://localhost", api_key="none")


def play(problem, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": problem["prompt"] + "\n"}]
    state = GRAPH.reset(problem["fields"], problem["seed"])
    for turn in range(1, TURNS + 1):
        reply = client.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content
        step = GRAPH.step(state, Action(text=text, number=turn))
        report = {"turn": turn, **step.info}
        if step.kind == "kg_query":
            report["query_validity"] = step.info["valid"] and not step.info["duplicate"]
        else:
            report["is_answer"] = step.kind == "answer"
        client.post("/info", cast_to=object, body=report)
        if step.done:
            return
        state, answer = step.state, {"role": "user", "content": step.observation}
        messages += [{"role": "assistant", "content": text}, answer]
