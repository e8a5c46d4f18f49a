"""Chat templates that fail: one line. How long a template may compute is not limited, as in transformers."""

import pytest

from megajax.config import ConfigError
from tests.data.test_chat_template import CHAT, template

HOSTILE = {
    "division": "{{ 1 // 0 }}",
    "remainder": "{{ 1 % 0 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a range": "{% for a in range(9000000) %}{% endfor %}",
    "an attribute": "{{ messages[0].content.nothing.more }}",
    "an overflow": "{{ (1e308 * 10) | int }}{{ (1e308 * 10) // 1 }}{{ x.y.z }}",
    "deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "nested": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "no template": "{% for %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_fails_is_refused_in_one_line(name, tmp_path):
    with pytest.raises(ConfigError) as error:
        template(HOSTILE[name], tmp_path).render(CHAT)
    assert "\n" not in str(error.value)
