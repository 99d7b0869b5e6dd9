"""An analysis as one HTML page that needs nothing beside itself."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..picture_style import INK, PAPER
from .colours import agent_colours


__all__ = ["analysis_page"]

# Picture -> its title, and how to read it.
_SECTIONS = {
    "density": (
        "How much of the model did each agent change?",
        "A plain average divides all of it by the number of agents, also what no other agent touched.",
    ),
    "overlaps": (
        "How much of it did others change too?",
        "Yellow is the agent's own: RAM keeps it in full. The darker, the more agents a mean is taken over.",
    ),
    "pairs": (
        "Who belongs together?",
        "Agents in order of likeness. Left: how much of the row's agent the column's also changed. Same sign: 50 % is "
        "chance, less is conflict. Cosine: 0 is unrelated, orange related, purple opposed.",
    ),
    "layers": (
        "Where did they change it?",
        "Each map is one agent: layers from left to right, kinds of modules downwards, embeddings and head at the "
        "sides. Agents with the same pattern compete for the same places.",
    ),
    "epsilons": (
        "Which epsilon?",
        "What is left when smaller changes are ignored. A good epsilon raises the middle curves while the right ones "
        "stay near zero. The vertical line is the epsilon of this analysis.",
    ),
    "magnitudes": (
        "Are unique changes as large as shared ones?",
        "Large unique changes (solid) carry what only this agent learned.",
    ),
}
_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#59636e;--paper:#fff;--card:#f6f8fa;--line:#d1d9e0;--link:#0969da}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--paper:#0d1117;--card:#151b23;--line:#3d444d;
--link:#58a6ff}}
*{box-sizing:border-box}
body{margin:0 auto;padding:2.5rem 1.25rem 4rem;max-width:62rem;background:var(--paper);color:var(--ink);
font:1rem/1.6 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .3rem;letter-spacing:-.01em}
h2{font-size:1.25rem;margin:3rem 0 .2rem;letter-spacing:-.01em}
p{margin:.2rem 0 .8rem;max-width:46rem}
.soft{color:var(--soft)}
.lead{margin:1.6rem 0 2rem;padding:0;list-style:none;max-width:48rem}
.lead li{padding:.55rem 0 .55rem 1rem;border-left:3px solid var(--link);margin-bottom:.5rem;overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(17rem,1fr));gap:.9rem}
.card{background:var(--card);border:1px solid var(--line);border-top:4px solid var(--hue);border-radius:8px;
padding:.8rem 1rem;overflow-wrap:anywhere}
.card h3{margin:0;font-size:1.05rem}
.card p{margin:.5rem 0 0;font-size:.88rem;line-height:1.5}
dl{display:grid;grid-template-columns:repeat(3,1fr);gap:.8rem;margin:.5rem 0 0}
dt{font-size:.72rem;color:var(--soft);line-height:1.3}
dd{margin:0;white-space:nowrap;font-size:1.1rem;font-weight:600;font-variant-numeric:tabular-nums}
figure{margin:.6rem 0 0}
.wide{overflow-x:auto}
figure svg{display:block;width:100%;height:auto}
figure svg text{font-family:inherit!important}
table{border-collapse:collapse;font-size:.86rem;font-variant-numeric:tabular-nums;margin:.6rem 0 1.2rem}
th,td{padding:.32rem .5rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600;color:var(--soft);vertical-align:bottom}
th:first-child,td:first-child{text-align:left;padding-left:0}
summary{cursor:pointer;color:var(--link);margin:.4rem 0}
h3{margin:1.6rem 0 .1rem;font-size:1.05rem}
code{font-size:.9em}
a{color:var(--link)}
"""


def analysis_page(data: dict[str, Any], pictures: Mapping[str, str], notes: Sequence[str]) -> str:
    """The page. Every string in the data is escaped: names of agents, models and tensors come from files.

    Args:
        data (`dict[str, Any]`):
            Content of `analysis.json`.
        pictures (`Mapping[str, str]`):
            The pictures as SVG, by name; none if they could not be drawn.
        notes (`Sequence[str]`):
            What was left out.
    """
    colours = agent_colours(data)
    count, base = len(data["agents"]), data["base_model"]
    title = f"{count} agents compared" if count > 1 else f"Agent {data['agents'][0]['label']}"
    revision = f" at {base['revision']}" if base["revision"] else ""
    head = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">Base <code>{escape(base["name"])}</code>{escape(revision)}, {data["total_parameters"]:,} '
        f"parameters. A parameter counts as changed beyond epsilon = {data['epsilon']:g}. "
        f"RAM+ with r = {data['r']:g}, alpha = {data['alpha']:g}.</p>",
        '<ul class="lead">',
        *(f"<li>{_prose(sentence)}</li>" for sentence in [*data["findings"]["summary"], *notes]),
        "</ul>",
        '<div class="cards">',
        *(
            _card(agent, sentence, colours[agent["label"]])
            for agent, sentence in zip(data["agents"], data["findings"]["agents"], strict=True)
        ),
        "</div>",
    ]
    sections = []
    for name, (heading, aid) in _SECTIONS.items():
        if name in pictures:
            sections += [
                f"<h2>{heading}</h2>",
                f'<p class="soft">{aid}</p>',
                f'<figure class="wide" role="img" aria-label="{escape(heading)}">{_inline(pictures[name])}</figure>',
            ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            *head,
            *sections,
            "<h2>In numbers</h2>",
            *_tables(data),
            '<p class="soft">All of it as data: <a href="analysis.json">analysis.json</a>. '
            f"Made by ram_trl {escape(data['ram_trl_version'])}.</p>",
            "</body></html>",
            "",
        ]
    )


def _card(agent: dict[str, Any], sentence: str, colour: str) -> str:
    facts = (
        ("of the model changed", agent["density"]),
        ("of that alone", agent["unique_share"]),
        ("kept by RAM+", agent["retained"]["ram_plus"]),
    )
    numbers = "".join(f"<div><dd>{_share(value)}</dd><dt>{name}</dt></div>" for name, value in facts)
    text = sentence.removeprefix(f"{agent['label']}: ")
    kind = {"full": "full fine-tune", "lora": "LoRA"}[agent["kind"]]
    return (
        f'<div class="card" style="--hue:{colour}"><h3>{escape(agent["name"])} '
        f'<span class="soft">v{agent["version"]}, {kind}</span></h3><dl>{numbers}</dl>'
        f"<p>{_prose(text[:1].upper() + text[1:])}</p></div>"
    )


def _prose(text: str) -> str:
    """Text in which a number stays with its unit."""
    return escape(text).replace(" %", "&nbsp;%")


def _inline(svg: str) -> str:
    """A picture as a part of the page: in its colours, as wide as it is, but not so narrow that it cannot be read."""
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(PAPER, "none")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    attributes, rest = svg.split(">", 1)
    width = re.search(r' width="([0-9.]+)pt"', attributes)[1]
    return re.sub(r' (width|height)="[^"]*"', "", attributes) + f' style="min-width:{float(width):.0f}px">{rest}'


def _tables(data: dict[str, Any]) -> Iterable[str]:
    agents = data["agents"]
    labels = [agent["label"] for agent in agents]
    yield _table(
        "Agents",
        (
            "agent",
            "changed",
            "density",
            "unique",
            "shared",
            "rho",
            "lambda",
            "as written",
            "RAM+ keeps",
            "average keeps",
        ),
        [
            (
                agent["label"],
                f"{agent['changed']:,}",
                _share(agent["density"]),
                f"{agent['unique']:,}",
                f"{agent['shared']:,}",
                agent["rho"] if isinstance(agent["rho"], str) else f"{agent['rho']:.3f}",
                f"{agent['lambda']:.4f}",
                _number(agent["effective_lambda"], ".4f"),
                _share(agent["retained"]["ram_plus"]),
                _share(agent["retained"]["average"]),
            )
            for agent in agents
        ],
        "rho = shared / unique; lambda multiplies the unique changes, as written after rounding to the base's dtype. "
        "Kept: how much of the agent's update the merged model has, along the update's direction.",
    )
    if data["pairs"]:
        yield _table(
            "Pairs",
            (
                "pair",
                "shared by both",
                "of the first",
                "of the second",
                "Jaccard",
                "times chance",
                "within tensors",
                "same sign",
                "cosine",
            ),
            [
                (
                    " and ".join(pair["agents"]),
                    f"{pair['overlap']:,}",
                    _share(pair["share_of_first"]),
                    _share(pair["share_of_second"]),
                    _number(pair["jaccard"], ".3f"),
                    _times(pair, "expected_overlap"),
                    _times(pair, "expected_overlap_by_tensor"),
                    _share(pair["sign_agreement"]),
                    _number(pair["cosine"], ".3f"),
                )
                for pair in data["pairs"]
            ],
            "Times chance: the overlap against that of independent placement at these densities, over the whole model "
            "and within each tensor.",
        )
    yield _table(
        "Magnitude",
        ("agent", "L1", "L2", "mean", "largest", "unique: L1", "mean", "shared: L1", "mean"),
        [
            (
                agent["label"],
                *(_number(agent["magnitude"]["all"][key], ".3g") for key in ("l1", "l2", "mean", "largest")),
                *(
                    _number(agent["magnitude"][part][key], ".3g")
                    for part in ("unique", "shared")
                    for key in ("l1", "mean")
                ),
            )
            for agent in agents
        ],
        "Of all changes, however small, and of the unique and shared ones beyond epsilon.",
    )
    steps = zip(*(agent["by_epsilon"] for agent in agents), strict=True)
    yield _table(
        "Epsilon",
        ("epsilon", *labels),
        [
            (
                f"{step[0]['epsilon']:g}",
                *(
                    f"{_share(one['density'])} / {_share(one['unique_share'])} / {_share(one['lost_magnitude'])}"
                    for one in step
                ),
            )
            for step in steps
        ],
        "Density / unique share / share of the update's L1 magnitude that is ignored.",
    )
    for name, key in (("Kinds of modules", "modules"), ("Layers", "layers")):
        rows = [(_place(group), f"{group['parameters']:,}", *map(_share, group["density"])) for group in data[key]]
        table = _table("", ("", "parameters", *labels), rows, "Density.")
        yield f"<details><summary>{name}</summary>{table}</details>"


def _place(group: dict[str, Any]) -> str:
    return group["module"] if "module" in group else f"{group['stack']} {group['layer']}"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], aid: str) -> str:
    heading = f"<h3>{title}</h3>" if title else ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'{heading}<p class="soft">{escape(aid)}</p><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _times(pair: dict[str, Any], expected: str) -> str:
    return f"{pair['overlap'] / pair[expected]:.2f}" if pair[expected] else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
