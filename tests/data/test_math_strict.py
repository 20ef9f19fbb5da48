"""The reward math_strict: the table of docs/rewards.md, answers that hide something, and answers that cost too much."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from megarl.data.rewards import math_strict

DOC = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
ROW = re.compile(r"^\| `(.+?)` \| `(.+?)` \| ([01]) \|$", re.MULTILINE)
TABLE = [tuple(cell.replace(r"\|", "|") for cell in row) for row in ROW.findall(DOC)]

MORE = r"""
42 | 042 | +42 | 42. | {42} | \left(42\right) | \boxed{42} | f(x) = 42 | 41.\overline{9} | 42e0 | x \in \{42\} | $42$
-\frac{1}{2} | \frac{-1}{2} | -0.5 | \frac{1}{-2} | -1/2 | −\frac12 | -.5
\frac{\pi}{4} | \pi/4 | \frac{1}{4}\pi | 0.25\pi | \frac{\pi}{2 \cdot 2}!
\frac{\sqrt{15}}{5} | \frac{\sqrt{3}}{\sqrt{5}} | \sqrt{0.6} | \sqrt{\frac{3}{5}} | \sqrt{15}/5
\sqrt{3} | 3^{1/2} | \sqrt 3 | sqrt(3) | \frac{\sqrt{6}}{\sqrt{2}}! | 1.7320508! | \frac{3}{\sqrt{3}} | \sqrt[4]{9}
10^{100} | 1e100 | 10^{100} | 10^{50} \cdot 10^{50}!
x^2+2x+1 | (x+1)^2 | 1 + 2x + x^2 | x(x+2)+1 | (x+1)(x+1) | (y+1)^2! | x^2+2x!
\frac{x}{2} | 0.5x | x/2 | \frac12 x | \frac{x^2}{2x}
|x| | \sqrt{x^2} | x!
(x,y)=(1,2) | (1,2) | (x,y) = (1,2) | (2,1)!
[0,1] | 0 \le x \le 1 | x \in [0,1] | [0,1]\! | (0,1)! | 1 \ge x \ge 0 | 0 \leq x < 1!
x \ge 2 | 2 \leq x | [2, \infty) | x > 2! | 2!
2x + y > 3 | y + 2x > 3 | 3 < 2x + y | 4x + 2y > 6 | 2x + y < 3! | 2x + y = 3!
\emptyset | \{\} | \varnothing | ∅ | 0!
A, C | C and A | \text{A and C} | \{A, C\} | A! | A, B, C!
red | \text{red} | Red | der!
\text{no solution} | No solution | \text{No  solution} | \text{one solution}!
\text{red, blue} | blue and red | \text{red}!
12\text{ m/s} | 12\,\text{m}/\text{s} | 12 m/s | 12\text{ meters per second} | 12\text{ m}!
1,000 | 1000 | 1\,000 | 1{,}000 | 1.000!
\$1,234.50 | 1234.5 dollars | \$1{,}234.50 | 1234.5!
$18.90 | \$18.90 | 18.9 dollars
The answer is $5$. | 5 | x=5 | 6!
\pm 2 | 2, -2 | -2, 2 | x = \pm 2 | x = 2 \text{ or } x = -2 | 2!
\begin{pmatrix}1\\2\end{pmatrix} | \begin{bmatrix}1\\2\end{bmatrix} | \begin{pmatrix}1&2\end{pmatrix}! | (1,2)!
\cos 20^\circ | \cos(20^\circ) | \cos \frac{\pi}{9} | 0.9397!
\int_0^x f | \int_0^x f | \int_0^x g!
x=1, y=2 | y=2, x=1 | x=2, y=1! | 1, 2!
(1,234) | (1, 234) | 1234!
11,\! 111,\! 100 | 11111100 | 11,111,100 | 11{,}111{,}100 | 11, 111, 100!
\log_2 3 | \frac{\ln 3}{\ln 2} | 1.58496!
\binom{10}{5} | 252 | \dbinom{10}{5} | \binom{10}{4}!
\binom{2n}{n} | \frac{(2n)!}{(n!)^2} | \binom{2n}{n-1}! | \binom{10^9}{10^8}!
(-1)^{n+1} | (-1)^{n-1} | (-1)^n! | 1!
e^{ix} | \cos x + i \sin x | \cos x - i \sin x!
(-\infty,\infty) | \mathbb{R} | x \in \mathbb R | (-\infty,0)!
30\text{ mph} | 30\text{ miles per hour} | 30\text{ miles}!
\text{yes} | \text{Yes.} | \text{No.}!
"""

HIDING = [
    "４２",
    "4\u200b2",
    "\u200b42",
    "４2",
    "𝟒𝟐",
    "٤٢",
    r"42 \phantom{0}",
    r"42\text{ or }43",
    r"\text{not } 42",
    r"\cancel{42}",
    r"\color{white}{42}",
    "42 % 41",
    "4%\n2",
    r"42 \hspace{1cm} 41",
    r"42 \\ 41",
    r"\text{\boxed{42}} 41",
    r"42 = \text{wrong}",
    r"42 \ne 41",
    r"\overset{?}{42}",
    r"42^{\text{nd}}",
    r"42_{10}",
    "forty two",
    "0x2A",
    "XLII",
    "42?",
    "42!",
    "~42, 41",
]

BOXES = {
    "42": 0,
    "$42$": 0,
    "The final answer is 42.": 0,
    r"\boxed{41} The final answer is 42.": 0,
    r"\boxed{41}. Final answer: $42$": 0,
    r"\boxed{42}, no, \boxed{41}": 0,
    r"\boxed{41}, no, \boxed{42}": 1,
    r"\boxed{42} and \boxed{": 0,
    r"\boxed{42} and \boxed{}": 0,
    r"\boxed{42": 0,
    r"\boxed{42} so it is not 41": 1,
    r"\boxed{41} \fbox{42}": 1,
    r"\boxed{x + \boxed{42}}": 0,
    r"\boxedx{42}": 0,
    r"<think>\boxed{41}</think> \boxed{42}": 1,
    "": 0,
}

EXPENSIVE = [
    "9^{9^{9}}",
    "9^{9^{9^9}}",
    "1e999999999",
    "10^{9}!",
    "1000000000!",
    "5" + "!" * 20,
    "(" * 450 + "1" + ")" * 450,
    r"\frac{1}{" * 150 + "2" + "}" * 150,
    r"\begin{pmatrix}" + "1&" * 400 + r"1\end{pmatrix}",
    r"\sqrt{" * 150 + "2" + "}" * 150,
    r"\sqrt{" + "9" * 900 + "}",
    "+".join(f"\\sqrt{{{number}}}" for number in range(2, 90)),
    "x" * 990,
    "(x+1)^{9999}",
    "e^{e^{e^{e^{e}}}}",
    r"\cos " * 190 + "1",
    r"\sin(10^{100})",
    r"\boxed{" * 140 + "41" + "}" * 140,
    "{" * 900,
    "2^{" + "-" * 900 + "1}",
    "2^" + "-" * 900,
    r"1,\pm 2" * 100,
    "1," * 450 + "1",
    "9" * 100_000,
]


def judge(box: str, answer: str) -> float:
    return math_strict(prompt="", response=f"so \\boxed{{{box}}}", answer=answer)


def test_the_table_has_a_hundred_answers() -> None:
    table = DOC.partition("| key | answer in the box |")[2].partition("\n\n")[0]
    assert len(TABLE) == len(table.splitlines()) - 2 > 100


@pytest.mark.parametrize(("answer", "box", "strict"), TABLE)
def test_the_table_of_the_documentation(answer: str, box: str, strict: str) -> None:
    assert judge(box, answer) == float(strict)


@pytest.mark.parametrize("line", MORE.strip().splitlines())
def test_spellings(line: str) -> None:
    """The first cell is the key; a cell that ends with ! is wrong."""
    key, *cells = (cell.strip() for cell in line.split(" | "))
    for cell in cells:
        assert judge(cell.removesuffix("!"), key) == (not cell.endswith("!")), cell


@pytest.mark.parametrize("box", HIDING)
def test_a_box_that_hides_something_is_wrong(box: str) -> None:
    assert judge(box, "42") == 0.0


@pytest.mark.parametrize(("response", "reward"), BOXES.items())
def test_the_last_box_alone_counts(response: str, reward: int) -> None:
    assert math_strict(prompt="", response=response, answer="42") == reward


@pytest.mark.parametrize("box", EXPENSIVE, ids=[box[:20] for box in EXPENSIVE])
def test_no_answer_takes_long(box: str) -> None:
    begin = time.process_time()
    for key in ("42", "x+1", r"\sqrt{2}"):
        assert judge(box, key) == 0.0
    assert time.process_time() - begin < 3.0


def test_which_answers_can_be_compared_with() -> None:
    for row in TABLE:
        judge("1", row[0])
    for answer in ("", "$ $", r"\boxed{}", r"\boxed{5"):
        with pytest.raises(ValueError, match="nothing to compare with"):
            judge("1", answer)
