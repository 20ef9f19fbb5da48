"""What counts as the answer of a response, and which spellings of an answer are equal.

Each line of SPELLINGS holds spellings of one value. The table is made from it: all spellings of a line are equal, as
answer and as response, and none is equal to a line with another value.
"""

from __future__ import annotations

import pytest

from megarl.data.math.lenient import last_box, read_response
from megarl.data.rewards import can_read_answer, math_verify

SPELLINGS = r"""
18.90 | \$18.90 | 18.90\,\$ | 18.9 | €18.90 | 18.90€ | \text{\$18.90} | 18.90 dollars | 18.90\text{ euros} | 18.90.
1234.50 | \$1,234.50 | \$1{,}234.50 | 1\,234.50 | 1,234.5 | 1,\!234.50
1234567 | 1,234,567 | 1{,}234{,}567 | 1\,234\,567 | 1\ 234\ 567
1, 234 | 234, 1 | \{1, 234\}
0.123456 | 0.123\,456
5 | 5.0 | 5\text{ cm} | 5\,\text{cm} | 5\,\mathrm{m} | 5\text{ m}^2 | 5 cm | \text{5 apples} | x = 5 | £5
5000000 | 5\text{ million} | \$5 \text{ million} | 5 million | \text{5 million}
-5 | −5 | -\$5 | -$5
50\% | 0.5 | \frac12 | \dfrac{1}{2} | \tfrac{1}{2} | 1/2 | \cfrac{1}{2}
12.5\% | 0.125
1.5 | \frac{3}{2} | 1\frac{1}{2} | 1 \frac{1}{2} | 1\dfrac{1}{2} | 1\frac12 | 1 1/2 | 1\ 1/2 | 1\,\frac{1}{2}
-1.5 | -1\frac{1}{2} | -1 1/2
9 | 9 \pmod{11} | 9 \pmod 7 | x \equiv 9 \pmod{11} | x \equiv 9 \pmod 7
45 | 45^\circ | 45^{\circ} | 45° | 45\degree | 45^\circ\text{C} | 45°C
\varnothing | \emptyset | ∅ | \{\} | \{ \} | \left\{\right\}
\{\emptyset\} | \{\varnothing\}
0 | \{0\}
\text{A, C} | A, C | \text{C, A} | A and C | \text{A and C} | \text{(A), (C)} | \text{A}, \text{C} | A \& C | \{A, C\}
A, B
A, B, C | \text{C, B, A} | \text{A, B, and C} | \text{A; B; C}
B | \text{B} | (B) | \text{(B)} | \textbf{(B)} | \mathrm{B} | \text{B}. | \mathbf{B}
C | \text{(C)}
\text{red, blue} | \text{blue, red} | \text{red and blue}
\text{der, blue}
\text{red} | red
(1,2) | \left(1,2\right)
\{1,2\} | \{2,1\} | \left\{1,2\right\}
(2,1)
[1,2]
[1,2)
(\frac12, 3) | \left(\frac{1}{2}, 3\right)
\{\frac12, 3\}
\pm 2 | 2, -2 | -2, 2 | x = \pm 2 | x = 2 \text{ or } x = -2
\frac{1 \pm \sqrt{5}}{2} | \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}
\sqrt{12} | 2\sqrt{3} | 2\sqrt 3
\begin{pmatrix}1\\2\end{pmatrix}
x^2+1 | 1+x^2
"""
CLASSES = [[spelling.strip() for spelling in line.split(" | ")] for line in SPELLINGS.strip().splitlines()]

BOXES = r"""
\boxed{1},\boxed{2}                                        2      1 | 1,2
\boxed{1} and \boxed{2}                                    2      1 | 1,2
$\boxed{1}$ or $\boxed{2}$                                 2      1 | 1,2
\boxed{1}, \boxed{2} and \boxed{3}                         3      1 | 2 | 1,2,3
\boxed{12}\boxed{13}                                       13     12 | 1213
\boxed{\boxed{3}}                                          3      33
\boxed{x+\boxed{2}}                                        x+2    2
\boxed{2} so \fbox{$3$}                                    3      2
\boxed {5}                                                 5      6
\boxed 5.                                                  5      6
$\boxed5$                                                  5      6
\boxed\frac12                                              0.5    1
\boxed{\frac{1}{\{2\}}}                                    0.5    1
\boxed{5} and $6$                                          5      6
5 \boxed{}                                                        5
\boxed{3} but \boxed{}                                            3
\boxed{3} no, \boxed{5                                            3
\boxed{3 and \boxed{5}                                     5      3
<think>\boxed{1}</think> \boxed{2}                         2      1
<think>so \boxed{1}</think> The answer is $2$.             2      1
<think>so \boxed{1}</think>                                1      2
The answer is \$18.90.                                     18.90  18
The set is $\varnothing$.                                  \{\}   0
The answer is $\{1,2\}$.                                   \{1,2\}  (1,2)
""".strip("\n").splitlines()


def judge(response: str, answer: str) -> float:
    return math_verify(prompt="", response=response, answer=answer)


@pytest.mark.parametrize("spellings", CLASSES, ids=[spellings[0] for spellings in CLASSES])
def test_all_spellings_of_a_value_are_equal_and_no_other_is(spellings: list[str]) -> None:
    for response in spellings:
        for answer in (*spellings, rf"\boxed{{{spellings[0]}}}"):
            assert judge(rf"so \boxed{{{response}}}", answer) == 1.0, (response, answer)
    for other in CLASSES:
        if other is not spellings:
            for response in other[::3]:
                assert judge(rf"\boxed{{{response}}}", spellings[0]) == 0.0, (response, spellings[0])


@pytest.mark.parametrize("row", BOXES)
def test_the_last_box_alone_counts(row: str) -> None:
    response, right, wrong = row[:59].strip(), *(row[59:].split(maxsplit=1) if row[59] != " " else ("", row[59:]))
    assert not right or judge(response, right) == 1.0
    for answer in wrong.split("|"):
        assert judge(response, answer.strip()) == 0.0


def test_an_answer_is_read_as_a_response_is() -> None:
    for answer in (r"The answer is $5$", r"$\boxed{5}$", r"\boxed{3}, \boxed{5}", r"\(5\)", "$$5$$"):
        assert judge(r"\boxed{5}", answer) == 1.0
        assert judge(r"\boxed{3}", answer) == 0.0
    assert judge(r"\boxed{1234.5}", "$1,234.50") == judge(r"\boxed{\$1,234.50}", "$1,234.50$") == 1.0


def test_which_answers_can_be_read() -> None:
    assert all(can_read_answer(answer) for spellings in CLASSES for answer in spellings)
    assert not any(map(can_read_answer, ("", "$ $", r"\boxed{}", r"\boxed{5", r"\text{}")))


def test_text_without_a_box_and_hostile_text() -> None:
    assert last_box("5") is None
    assert last_box(r"\boxedfoo{5}") is None
    for text in (r"\boxed{" * 2000, r"\boxed" * 2000, "{" * 10_000, "1" * 10_000, " " * 10_000, r"\{ " * 3000):
        assert read_response(lambda _: [], text) == []
