"""Chat templates that never end, grow without end or fail: one line, at once."""

import time

import pytest

from megajax.config import ConfigError
from megajax.data.chat_template import ChatTemplate

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
LOOP = "{% for a in range(90000) %}"
NAMED = "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
HOSTILE = {
    "division": "{{ 1 // 0 }}",
    "remainder": "{{ 1 % 0 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursion that branches": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "loops": LOOP * 3 + "x" + "{% endfor %}" * 3,
    "doubling": NAMED + "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "adding": NAMED + "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "replacing": NAMED + "{% set n.x = n.x.replace('a', n.x) %}{% endfor %}{{ n.x }}",
    "a product": "{{ 'x' * 10000000000 }}",
    "a list": "{{ ([0] * 10000000000)|length }}",
    "a power": "{{ 9 ** 999999999 }}",
    "a width": "{{ '%1000000000000d' % 1 }}",
    "justified": "{{ 'x'.ljust(100000000000) }}",
    "an attribute": "{{ messages[0].content.nothing.more }}",
    "an overflow": "{{ 1e308 * 10 | int }}{{ (1e308 * 10) | int }}",
    "deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "nested": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "no template": "{% for %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_at_once(name):
    start = time.process_time()
    with pytest.raises(ConfigError) as error:
        ChatTemplate(HOSTILE[name], {}, "template").render(CHAT)
    assert "\n" not in str(error.value) and time.process_time() - start < 30


def test_operators_and_methods_are_jinjas():
    source = (
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m['content'] | trim ~ loop.index * 2 }}{% endfor %}"
        "{{ '%05.1f' % 2.5 }}{{ 2 ** 3 % 5 }}{{ ', '.join(['a', 'b']) }}{{ 'aXb'.replace('X', '-').ljust(5) }}"
        "{{ range(3) | list }}{{ [1] + [2] }}{{ '-' * 3 }}{{ none ~ 1 }}"
    )
    assert ChatTemplate(source, {}, "template").render(CHAT) == (
        "<user>Hi2<assistant>Ho4002.53a, ba-b  [0, 1, 2][1, 2]---None1"
    )
