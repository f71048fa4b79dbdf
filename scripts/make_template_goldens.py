#!/usr/bin/env python3
"""Renders chat templates the way transformers does, as goldens for tests/text/jinja.

    python scripts/make_template_goldens.py        (needs transformers and jinja2; not at build time)

Writes tests/text/jinja/data/templates.json:
    inputs: {name: {messages, tools, add_generation_prompt, bos_token, eos_token, extra}}
    now:    the local time that strftime_now formats, [year, month, day, hour, minute, second]
    cases:  [{name, template, input, out | error, raised}]
`error` is the Python exception, only that there is one is compared; `raised` is there when
raise_exception was called and holds its message. The templates here are written for this file; the
ones named after chat formats follow their structure, not their text.
"""
import datetime
import json
import os
import pathlib
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import jinja2
from transformers.utils import chat_template_utils

NOW = [2024, 7, 4, 9, 5, 7]
OUT = pathlib.Path(__file__).resolve().parent.parent / "tests/text/jinja/data/templates.json"


class FixedDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(*NOW)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city — now & then",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name, e.g. \"Zürich\""},
                "days": {"type": "integer", "default": 1},
                "units": {"type": ["string", "null"], "enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Now.", "parameters": {"type": "object", "properties": {}}}}
CHAT = [
    {"role": "system", "content": " You are terse. "},
    {"role": "user", "content": "Hi <b>&amp;</b> \"q\" 'a' é"},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "  What is the pass key?"},
]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "id": "call_1", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}},
            {"type": "function", "id": "call_2", "function": {"name": "clock", "arguments": "{\"tz\": \"UTC\"}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "{\"c\": 21.5}"},
    {"role": "tool", "tool_call_id": "call_2", "name": "clock", "content": "12:00"},
    {"role": "assistant", "content": "Warm."},
    {"role": "user", "content": "Thanks"},
]
INPUTS = {
    "chat": dict(messages=CHAT, tools=None, add_generation_prompt=True, bos_token="<s>", eos_token="</s>", extra={}),
    "plain": dict(messages=CHAT[1:], tools=None, add_generation_prompt=False, bos_token="<s>", eos_token="</s>", extra={}),
    "bare": dict(messages=CHAT[1:2], tools=None, add_generation_prompt=True, bos_token="", eos_token="", extra={}),
    "odd": dict(messages=CHAT[1:2] + CHAT[1:2], tools=None, add_generation_prompt=True, bos_token="<s>", eos_token="</s>", extra={}),
    "tools": dict(messages=CALLS, tools=[WEATHER, CLOCK], add_generation_prompt=True, bos_token="<s>", eos_token="</s>", extra={}),
    "think": dict(
        messages=[
            {"role": "user", "content": "Sum?"},
            {"role": "assistant", "content": "<think>\none and one\n</think>\n\nTwo."},
            {"role": "user", "content": "And more?"},
            {"role": "assistant", "reasoning_content": "\ntwo and two\n", "content": "Four."},
            {"role": "user", "content": "Sure?"},
        ],
        tools=None, add_generation_prompt=True, bos_token="<s>", eos_token="</s>", extra={"enable_thinking": False},
    ),
    "parts": dict(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": " see?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]},
            {"role": "user", "content": "ok"},
        ],
        tools=None, add_generation_prompt=True, bos_token="<s>", eos_token="</s>", extra={},
    ),
    "data": dict(
        messages=[{"role": "user", "content": "x"}],
        tools=None, add_generation_prompt=False, bos_token="<s>", eos_token="</s>",
        extra={
            "i": 7, "n": -3, "f": 2.5, "big": 9007199254740993, "tiny": 1e-07, "huge": 1e22, "zero": 0, "nil": None, "yes": True, "no": False,
            "s": "The quick Brown fox", "empty": "", "ws": " \t\u00a0a b\u3000\n", "uni": "naïve ΣΑΣ straße ﬁn 東京 😀", "csv": "a,b,,c", "lines": "one\ntwo\r\n\nthree\u2028four\n",
            "quotes": "it's \"so\"\\ \t\n\u0001\u007f\u200b", "list": [3, 1, 2], "words": ["pear", "Apple", "fig", "apple"], "mixed": [1, "1", 1.0, True, None, [], {}],
            "nested": {"b": {"c": [1, {"d": "deep"}]}, "a": 1, "B": 2, "items": "shadowed", "key": "k"},
            "people": [{"name": "Ann", "age": 30, "tags": ["x"]}, {"name": "bob", "age": 25, "tags": []}, {"name": "Cid", "age": 30}],
            "date_string": "1 May",
        },
    ),
}

CASES = {}


def case(name, template, *inputs):
    for i in inputs or ("data",):
        key = name if len(inputs) < 2 else f"{name}.{i}"
        assert key not in CASES, key
        CASES[key] = (template, i)


def group(prefix, templates, input_name="data"):
    for i, template in enumerate(templates):
        case(f"{prefix}.{i:02d}", template, input_name)


# ---- white space ----
group("space", [
    "a\n{% if yes %}\nb\n{% endif %}\nc\n",
    "a\n  {% if yes %}\n  b\n  {% endif %}\n  c",
    "a\n  {%+ if yes %}\n  b\n  {%+ endif %}\n  c",
    "a  {% if yes %}  b  {% endif %}  c",
    "a  {%- if yes -%}  b  {%- endif -%}  c",
    "a\n\n  {%- if yes -%}\n\n b \n\n{%- endif -%}\n\n c",
    "a\n{% if yes +%}\nb\n{% endif +%}\nc",
    "a\n  {{ i }}\n  b\n",
    "a\n  {{- i -}}\n  b\n",
    "a\n  {{+ i }}\n  b\n",
    "a {{- ' ' }}b{{ ' ' -}} c",
    "\n\n{% if yes %}\n\nx\n\n{% endif %}\n\n",
    "x\n\n\n",
    "x\r\ny\rz\r\n",
    "\n",
    "",
    "   {% if yes %}x{% endif %}",
    "\t {% if yes %}\t x{% endif %}\t ",
    "a\u00a0{%- if yes -%}\u3000x{% endif %}",
    "a\n\u00a0 {% if yes %}x{% endif %}",
    "{% if yes %}\n{% if yes %}\n  x\n{% endif %}\n{% endif %}\n!",
    "{% for x in list %}\n  {{ x }}\n{% endfor %}\n!",
    "{% for x in list -%}\n  {{ x }}\n{%- endfor %}\n!",
    "{% set a = 1 %}\n{% set b = 2 %}\n{{ a + b }}\n",
    "{% set a %}\n  x\n{% endset %}\n[{{ a }}]",
    "x {# c #}\n y",
    "x\n  {# c #}\n  y",
    "x\n  {#- c -#}\n  y",
    "x\n  {#+ c +#}\n  y",
    "x {#\n multi\n line -#}   y",
    "{##}{#-#}{#--#}x",
    "{% raw %}{{ a }} {% b %} {# c #}{% endraw %}",
    "x\n  {% raw %}\n  {{ a }}\n  {% endraw %}\n  y",
    "x\n  {%- raw -%}\n  {{ a }}\n  {%- endraw -%}\n  y",
    "x\n  {%+ raw %}\n  {{ a }}\n  {%+ endraw +%}\n  y",
    "{% raw %}\n{% endraw %}\n{% raw -%}\n\n  z{% endraw %}",
    "{%if yes%}a{%endif%}{{i}}{{ i}}{{i }}",
    "{%\nif\nyes\n%}\na{%\nendif\n%}\nb",
    "{{\n  i\n}}\nx",
    "a {% if no %}\n b\n {% else %}\n c\n {% endif %}\n d",
    "{ { } } % # {x} {'a'} }} %} #}",
    "{% if yes %}  {% endif %}|",
    "{{ 'a' }}\n{{ 'b' }}\n\n{{ 'c' }}",
    "line\n   {% if yes %}   {% if yes %}x{% endif %}   {% endif %}\nend",
    "line\n   {% if yes -%}   \n   {% if yes %}x{% endif %}   {% endif %}\nend",
    "{%- if yes -%}\n  {{- 'x' -}}\n{%- endif -%}\n",
    "{{ '}}' }}{{ '%}' }}{{ \"{{\" }}{{ {'a': {'b': 1}}['a']['b'] }}{{ {'a': {'b': 1}} }}",
])

# ---- literals and strings ----
group("literal", [
    r"""{{ 'a\nb\tc\\d\'e\"f' }}|{{ "a'b\"c" }}""",
    r"{{ '\x41\u00e9\U0001F600\101\7\0z' | tojson }}",
    r"{{ '\d\q\é\%' }}",
    "{{ 'a\\\nb' }}|{{ 'a\nb' }}|{{ 'a\r\nb' | length }}",
    "{{ 'a' 'b' \"c\" }}",
    "{{ 0 }} {{ 12 }} {{ 1_000 }} {{ 0x1F }} {{ 0b101 }} {{ 0o17 }} {{ 00 }} {{ -5 }} {{ +5 }}",
    "{{ 1.0 }} {{ 1.5e3 }} {{ 1e3 }} {{ 1E-7 }} {{ 1.25 }} {{ 1_0.5_0 }} {{ 1e16 }} {{ 123456789012345680.0 }} {{ 0.1 + 0.2 }}",
    "{{ 1e15 }} {{ 0.0001 }} {{ 0.00001 }} {{ 1e308 * 10 }} {{ -1e308 * 10 }} {{ 1e22 }} {{ 1.7976931348623157e308 }} {{ 5e-324 }} {{ -0.0 }}",
    "{{ true }} {{ false }} {{ none }} {{ True }} {{ False }} {{ None }}",
    "{{ [] }} {{ [1] }} {{ [1, 'a', none, true, 1.0,] }} {{ {} }} {{ {'a': 1, 2: 'b', none: [1],} }}",
    "{{ () }} {{ (1,) }} {{ (1, 2) }} {{ 1, 2 }} {{ (1) }} {{ ((1, 2), 3) }}",
    "{{ [quotes, \"'\", '\"', '\\'\"'] }}",
    "{{ [uni, '\u00a0', '\u3000', '\U0001F600', '\u0301', '\ue000'] }}",
    "{{ {'a': {'b': [1, 2.5, 'x']}} }} {{ {1: 2, 1.0: 3, true: 4} }}",
    "{{ [undefined_thing] }} {{ [[], [[]], {}] }} {{ 'x' }}",
    "{{ ['<b>' | safe, 'é'] }}",
    "{{ naïve is defined }} {{ _x is defined }} {{ x1 is defined }}",
    "{{ 'a{{b}}' }}{{ 'x' ~ '{% y %}' }}",
])

# ---- arithmetic ----
group("arith", [
    "{{ 7 + 2 }} {{ 7 - 2 }} {{ 7 * 2 }} {{ 7 / 2 }} {{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 10 }} {{ 8 / 2 }}",
    "{{ -7 // 2 }} {{ -7 % 3 }} {{ 7 // -2 }} {{ 7 % -3 }} {{ -7 % -3 }} {{ 0 // 5 }} {{ 2 ** -1 }} {{ 2 ** 0 }}",
    "{{ 7.5 // 2 }} {{ -7.5 // 2 }} {{ 7.5 % 2 }} {{ -7.5 % 2 }} {{ 7.5 % -2 }} {{ 1e20 % 3 }} {{ 0.0 // 1 }} {{ 6.0 % 3 }}",
    "{{ 2 ** 3 ** 2 }} {{ -2 ** 2 }} {{ (-2) ** 2 }} {{ 2 ** 0.5 }} {{ 10 ** 18 }}",
    "{{ 1 + 2 * 3 }} {{ (1 + 2) * 3 }} {{ 10 - 2 - 3 }} {{ 100 / 10 / 5 }} {{ 2 * 3 % 4 }} {{ -3 + 5 }} {{ - -3 }} {{ +-3 }}",
    "{{ true + 1 }} {{ true + true }} {{ false * 5 }} {{ -true }} {{ +true }} {{ 1 - false }} {{ true / 2 }} {{ [1] * true }}",
    "{{ 'a' + 'b' }} {{ 'ab' * 3 }} {{ 3 * 'ab' }} {{ 'a' * 0 }}| {{ 'a' * -1 }}| {{ [1] + [2] }} {{ [1, 2] * 2 }} {{ (1,) + (2,) }} {{ 2 * (1,) }}",
    "{{ 'a' ~ 1 ~ none ~ 2.5 ~ true ~ [1] ~ undefined_thing }} {{ 1 ~ 2 + '3' }} {{ '1' + 2 ~ 3 }} {{ 2 * 3 ~ 4 }} {{ 1 ~ -2 ~ 3 // 2 }}",
    "{{ big }} {{ big + 1 }} {{ huge }} {{ tiny }} {{ f }} {{ i / f }} {{ 9223372036854775807 }} {{ -9223372036854775807 - 1 }}",
    "{{ 1 == 1.0 }} {{ 1 == true }} {{ 'a' == 'a' }} {{ 1 == '1' }} {{ [1, 2] == [1, 2.0] }} {{ (1,) == [1] }} {{ {'a': 1, 'b': 2} == {'b': 2, 'a': 1} }} {{ none == false }} {{ nil == none }}",
    "{{ 1 < 2 }} {{ 2 <= 2 }} {{ 'a' < 'b' }} {{ 'B' < 'a' }} {{ 'é' > 'z' }} {{ [1, 2] < [1, 3] }} {{ (1,) < (1, 2) }} {{ 1 < 2 < 3 }} {{ 1 < 2 > 3 }} {{ 3 > 2 >= 2 != 1 }} {{ 1.5 > true }}",
    "{{ 1 in [1, 2] }} {{ 3 not in [1, 2] }} {{ 'b' in 'abc' }} {{ '' in 'abc' }} {{ 'a' in {'a': 1} }} {{ 1 in {'a': 1} }} {{ 1 in (1,) }} {{ none in [none] }} {{ 'x' in undefined_thing }} {{ 2 in range(3) }}",
    "{{ not true }} {{ not not 1 }} {{ not 'a' in 'abc' }} {{ 1 and 2 }} {{ 0 and 2 }} {{ 0 or 'x' }} {{ '' or [] }} {{ 1 or 2 and 0 }} {{ (1 or 2) and 0 }} {{ none or none }}",
    "{{ 'a' if yes else 'b' }} {{ 'a' if no else 'b' }} {{ 'a' if no }}| {{ 1 if no else 2 if no else 3 }} {{ (1 if yes) + 1 }} {{ 'x' if not no }}",
    "{{ undefined_thing == undefined_other }} {{ undefined_thing == none }} {{ undefined_thing != 1 }} {{ undefined_thing or 'd' }} {{ not undefined_thing }}",
    "{{ '%s-%d-%5.2f|%-5s|%5s|%05d|%x|%X|%o|%e|%g|%%|%+d|% d|%r' % ('a', 3, 2.5, 'l', 'r', 42, 255, 255, 8, 12345.678, 0.0001, 5, 5, 'q') }}",
    "{{ '%s' % 'a' }} {{ '%s %s' % (1, [2]) }} {{ '%(a)s %(b)03d' % {'a': 'x', 'b': 7} }} {{ '%.2s' % 'abc' }} {{ '%*d' % (5, 42) }} {{ '%d' % 3.9 }} {{ '%s' % none }} {{ '%i' % true }} {{ '%.3f' % 1 }}",
    "{{ '{} {} {}'.format(1, 'a', none) }} {{ '{1}{0}'.format('a', 'b') }} {{ '{x}-{y.name}-{y[age]}'.format(x=1, y=people[0]) }} {{ '{{}}'.format() }} {{ '{0[1]}'.format(list) }}",
    "{{ '{:>6}|{:<6}|{:^6}|{:*^7}|{:06.2f}|{:,}|{:+d}|{:x}|{:#x}|{:b}|{:.1%}|{:e}|{!r:>5}|{:.2}|{:5}|{:5}'.format('a', 'b', 'c', 'd', 3.14159, 1234567, 5, 255, 255, 5, 0.256, 1234.5, 'q', 'xyz', 42, 'z') }}",
    "{{ 0 == -0.0 }} {{ 1e308 * 10 == 1e308 * 10 }} {{ 9007199254740993 == 9007199254740992.0 }} {{ 9007199254740993 > 9007199254740992.0 }}",
])

# ---- look-ups ----
group("get", [
    "{{ nested.a }} {{ nested['a'] }} {{ nested.b.c[1].d }} {{ nested['b']['c'][0] }} {{ nested.missing }}| {{ nested['missing'] }}| {{ nested.b['c'].0 }}",
    "{{ list[0] }} {{ list[-1] }} {{ list[5] }}| {{ list[-4] }}| {{ list.0 }} {{ s[0] }} {{ s[-1] }} {{ s[99] }}| {{ uni[-1] }} {{ uni[2] }} {{ (1, 2)[1] }} {{ list[true] }}",
    "{{ list[1:] }} {{ list[:1] }} {{ list[:] }} {{ list[::-1] }} {{ list[::2] }} {{ list[-2:] }} {{ list[5:] }} {{ list[:-1] }} {{ list[1:1] }} {{ list[2:0:-1] }} {{ (1, 2, 3)[1:] }}",
    "{{ s[4:9] }} {{ s[:-4] }} {{ s[::-1] }} {{ s[::3] }} {{ s[-3:] }} {{ uni[2:4] }} {{ uni[::-1] }} {{ s[100:] }}| {{ s[3:1] }}| {{ s[none:3] }} {{ s[-100:3] }} {{ s[3::-1] }} {{ s[:100:50] }}",
    "{{ nested.items is callable }} {{ nested['items'] }} {{ nested.key }} {{ nested.get('items') }} {{ nested.keys() }} {{ nested.values() | list | length }}",
    "{{ nested.get('a') }} {{ nested.get('zz') }} {{ nested.get('zz', 5) }} {{ nested.get('zz', none) is none }} {{ nested.get(nil) }}",
    "{% for k, v in nested.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k in nested %}{{ k }};{% endfor %}{{ nested | list }} {{ nested | length }} {{ nested.b.items() }} {{ nested.b.keys() }} {{ nested.b.values() }}",
    "{{ nil.x }}| {{ nil['x'] }}| {{ i.x }}| {{ i[0] }}| {{ f['a'] }}| {{ list.foo }}| {{ s.foo }}| {{ list['a'] }}| {{ yes.x }}|{{ 1.2.3 }}",
    "{{ {1: 'a', 'b': 2, (1, 2): 'c', none: 'd', true: 'e'}[1] }} {{ {(1, 2): 'c'}[1, 2] }} {{ {none: 'd'}[none] }} {{ {1.0: 'q'}[1] }}",
    "{{ messages[0].role }} {{ messages[-1]['content'] }} {{ messages | length }} {{ messages[0] }} {{ messages[5] is defined }}",
    "{{ 'abc'.upper() }} {{ 'abc'['upper']() }} {{ ('a' ~ 'b').upper() }} {{ 'a'.upper().lower().title() }} {{ 5 .x }}|",
    "{{ nested['b', 'c'] }}| {{ nested[[1]] }}| {{ list[nil] }}| {{ list['0'] }}| {{ s['0'] }}|",
    "{{ people[0].tags[0] }} {{ people[2].tags }}| {{ people[0].name[0] }} {{ people.0.name }}",
])

# ---- undefined and none ----
group("undefined", [
    "{{ x }}|{{ x is defined }}|{{ x is undefined }}|{{ x is none }}|{{ nil is none }}|{{ nil is defined }}|{{ nested.q is defined }}|{{ nested.q is none }}",
    "{% for a in x %}a{% else %}none{% endfor %}|{{ x | length }}|{{ x | list }}|{{ x | join }}|{{ x | trim }}|{{ x | upper }}|{{ x | string | length }}|{{ x | first }}|{{ x | last }}|{{ x | items | list }}",
    "{{ x | default('d') }} {{ nil | default('d') }} {{ nil | default('d', true) }} {{ '' | default('d') }} {{ '' | d('d', boolean=true) }} {{ x | default }}| {{ nested.q | default([]) }} {{ 0 | default(1, true) }}",
    "{{ x | replace('a', 'b') }}|{{ x | map('upper') | list }}|{{ x | selectattr('a') | list }}|{{ x is string }}|{{ x is iterable }}|{{ x is sequence }}|{{ x is mapping }}|{{ x is callable }}|{{ x is number }}",
    "{{ nil | map('upper') | list }}|{{ nil | string }}|{{ nil | tojson }}|{{ nil | trim }}|{{ nil | upper }}",
    "{{ x ~ 'a' }}|{{ 'a' if x else 'b' }}|{{ x | bool if x else 'c' }}|{{ [x] | length }}|{{ x in [x] }}|{{ x == x }}",
])
for i, expr in enumerate(["x.y", "x['y']", "x + 1", "'a' + x", "1 + x", "x < 1", "x()", "-x", "x[0]", "x[1:]", "nested.q.r", "x | int", "x | float", "x | tojson", "'a'.startswith(x)", "x.items()",
                          "nil.x.y", "nil + 1", "nil | length", "nil | list", "nil | first", "nil | join", "nil[1:]", "nil()", "nested.items.x.y", "5 | length", "5 | list", "i[1:]", "nested | first | int + 'a'", "i.x()"]):
    case(f"undefined.fail.{i:02d}", "a{{ " + expr + " }}b")

# ---- filters ----
group("filter.text", [
    "{{ s | upper }} {{ s | lower }} {{ s | title }} {{ s | capitalize }} {{ uni | upper }} {{ uni | lower }} {{ uni | title }} {{ uni | capitalize }}",
    "{{ 'hello-world (foo) [bar] {baz} <qux> it\\'s a_b' | title }} {{ '' | capitalize }}| {{ 5 | upper }} {{ none | lower }} {{ true | upper }} {{ [1, 'A'] | lower }}",
    "[{{ ws | trim }}] [{{ 'xxaxx' | trim('x') }}] [{{ 'abcba' | trim('ab') }}] [{{ '\n a \n' | trim }}] [{{ 5 | trim }}] [{{ '' | trim }}]",
    "{{ s | replace('o', '0') }} {{ s | replace('o', '0', 1) }} {{ 'aaa' | replace('aa', 'b') }} {{ 'abc' | replace('', '-') }} {{ 'abc' | replace('', '-', 2) }} {{ 123 | replace(2, 'x') }} {{ 'abc' | replace('c', '') }}",
    "{{ s | length }} {{ uni | length }} {{ '' | length }} {{ list | length }} {{ nested | count }} {{ s | wordcount }} {{ uni | wordcount }} {{ 'a_b c-d' | wordcount }}",
    "{{ s | reverse }} {{ uni | reverse }} {{ list | reverse | list }} {{ nested | reverse | list }} {{ (1, 2) | reverse | list }} {{ list | map('string') | reverse }}",
    "{{ s | list }} {{ 'é😀' | list }} {{ list | list }} {{ nested.b | list }} {{ '' | list }} {{ range(3) | list }}",
    "{{ s | first }} {{ s | last }} {{ list | first }} {{ list | last }} {{ [] | first }}| {{ [] | last }}| {{ '' | first }}| {{ nested | first }} {{ nested | last }} {{ nested.items() | list | first }} {{ uni | last }}",
    "{{ s | truncate(9) }}|{{ s | truncate(9, true) }}|{{ s | truncate(11, false, '~') }}|{{ s | truncate(9, true, '..', 0) }}|{{ s | truncate }}|{{ 'abcdefghij' | truncate(3) }}|{{ 'abcdefghij' | truncate(5, leeway=0) }}|{{ uni | truncate(4, true, '', 0) }}",
    "{{ lines | indent }}|{{ lines | indent(2) }}|{{ lines | indent(2, true) }}|{{ lines | indent(2, blank=true) }}|{{ lines | indent('> ', true, true) }}|{{ 'a' | indent }}|{{ '' | indent(first=true) }}|{{ 'a\n' | indent(0) }}",
    "{{ 'a' | center(5) }}|{{ 'ab' | center(5) }}|{{ 'abc' | center(2) }}|{{ 'a' | center | length }}",
    "{{ '<a href=\"x\">\\'&' | e }} {{ '<' | escape | e }} {{ '<' | safe }} {{ '<' | e | forceescape }} {{ 5 | e }} {{ none | e }}",
    "{{ ('<b>' | safe) + '<' }} {{ '<' + ('<b>' | safe) }} {{ ('<b>' | safe) ~ '<' }} {{ ('<%s>' | safe) % '<' }} {{ ('<b>' | safe) is escaped }} {{ ('<' | safe | upper) + '<' }} {{ ('<' | safe) | string is escaped }} {{ ['<' | safe, '<'] | join }}",
    "{{ '%s-%s' | format('a', 1) }} {{ '%(x)s' | format(x=3) }} {{ 'plain' | format }} {{ '%s' | format([1, 2]) }} {{ '%d%%' | format(5) }}",
    "{{ 5 | string }} {{ 'a' | string }} {{ none | string }} {{ [1] | string }} {{ 1.0 | string }} {{ (5 | string) is string }}",
    "{{ 'a' | attr('upper') is callable }} {{ ('a' | attr('upper'))() }} {{ nested | attr('a') }}| {{ 'a' | attr('nope') }}|",
    "{{ 'x' is filter }} {{ 'upper' is filter }} {{ 'odd' is test }} {{ 'zzz' is test }}",
])
group("filter.number", [
    "{{ '42' | int }} {{ '42.7' | int }} {{ 42.9 | int }} {{ -42.9 | int }} {{ 'x' | int }} {{ 'x' | int(7) }} {{ 'x' | int(default=none) }} {{ '0x1f' | int(base=16) }} {{ 'ff' | int(0, 16) }} {{ '0b11' | int(0, 2) }} {{ true | int }} {{ none | int }} {{ [] | int(3) }} {{ ' 5 ' | int }} {{ '1_000' | int }} {{ '' | int }} {{ '-7' | int }} {{ '1e3' | int }} {{ 'inf' | int }} {{ 'nan' | int }} {{ '0o17' | int(base=8) }} {{ '017' | int }} {{ '0x1f' | int }}",
    "{{ '2.5' | float }} {{ 'x' | float }} {{ 'x' | float(1.5) }} {{ 3 | float }} {{ true | float }} {{ none | float }} {{ '1e3' | float }} {{ ' 2 ' | float }} {{ 'inf' | float }} {{ '-inf' | float }} {{ '1_0.5' | float }} {{ '.5' | float }} {{ '5.' | float }} {{ '+1' | float }} {{ '1e400' | float }} {{ '' | float }} {{ '0x10' | float }}",
    "{{ 42.55 | round }} {{ 42.55 | round(1) }} {{ 42.55 | round(1, 'floor') }} {{ 42.45 | round(1, 'ceil') }} {{ 2.5 | round }} {{ 3.5 | round }} {{ -2.5 | round }} {{ 5 | round }} {{ 5 | round(2) }} {{ 5 | round(0, 'floor') }} {{ 2.675 | round(2) }} {{ 1234.5 | round(-2) }} {{ 0.5 | round }} {{ 1.005 | round(2) }} {{ 1e300 | round }} {{ true | round }} {{ 1.5 | round(method='ceil') }} {{ 2.1 | round | int }}",
    "{{ -5 | abs }} {{ n | abs }} {{ 2.5 | abs }} {{ (-2.5) | abs }} {{ true | abs }} {{ -0.0 | abs }}",
    "{{ list | sum }} {{ [1.5, 2] | sum }} {{ [] | sum }} {{ people | sum('age') }} {{ people | sum(attribute='age', start=100) }} {{ [[1], [2]] | sum(start=[]) }} {{ [true, true] | sum }}",
    "{{ list | min }} {{ list | max }} {{ words | min }} {{ words | max }} {{ words | min(case_sensitive=true) }} {{ [] | min }}| {{ people | max(attribute='age') }} {{ people | min('age', 'age') is defined }} {{ 'bca' | max }} {{ [1, 2.5] | max }}",
])
group("filter.sequence", [
    "{{ list | sort }} {{ list | sort(reverse=true) }} {{ words | sort }} {{ words | sort(case_sensitive=true) }} {{ words | sort(true) }} {{ people | sort(attribute='name') | map(attribute='name') | list }} {{ people | sort(attribute='age,name') | map(attribute='name') | list }} {{ 'bca' | sort }} {{ people | sort(attribute='age', reverse=true) | map(attribute='name') | join }}",
    "{{ words | unique | list }} {{ words | unique(true) | list }} {{ people | unique(attribute='age') | map(attribute='name') | list }} {{ [1, 1.0, true, 2] | unique | list }} {{ 'aAb' | unique | join }}",
    "{{ list | join }} {{ list | join(', ') }} {{ people | join('+', attribute='name') }} {{ [] | join('x') }}| {{ [1, none, 'a', 2.5, true, [1]] | join('|') }} {{ 'abc' | join('-') }} {{ nested | join(',') }} {{ list | join(5) }}",
    "{{ words | map('upper') | list }} {{ words | map('replace', 'p', 'q') | join(' ') }} {{ people | map(attribute='name') | list }} {{ people[:2] | map(attribute='tags.0') | list }} {{ people | map(attribute='zip', default='-') | list }} {{ list | map('string') | join }} {{ words | map('length') | sum }} {{ ['1', '2'] | map('int') | sum }}",
    "{{ list | select('odd') | list }} {{ list | select | list }} {{ list | reject('odd') | list }} {{ [0, 1, '', 'a', none] | select | list }} {{ [0, 1, ''] | reject | list }} {{ list | select('gt', 1) | list }} {{ words | select('in', ['fig']) | list }} {{ list | select('divisibleby', 3) | list }} {{ list | select('>=', 2) | list }} {{ mixed | select('string') | list }}",
    "{{ people | selectattr('age', 'equalto', 30) | map(attribute='name') | list }} {{ people | selectattr('tags') | list | length }} {{ people | rejectattr('tags') | map(attribute='name') | list }} {{ people | selectattr('tags', 'defined') | list | length }} {{ people | rejectattr('age', 'lt', 28) | list | length }} {{ people | selectattr('name', 'in', ['bob']) | first }} {{ people | selectattr('age', '==', 25) | list | length }}",
    "{{ nested | dictsort | map('first') | list }} {{ nested | dictsort(true) | map('first') | list }} {{ {'x': 2, 'y': 1} | dictsort(by='value') }} {{ {'x': 2, 'y': 1} | dictsort(false, 'key', true) }} {{ {} | dictsort }} {% for k, v in {'q': 1, 'p': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}",
    "{% for k, v in nested | items %}{{ k }};{% endfor %}{{ {} | items | list }} {{ nested.b | items | list }}",
    "{% for g in people | groupby('age') %}{{ g.grouper }}:{{ g.list | map(attribute='name') | join(',') }};{% endfor %}{% for age, who in people | groupby('age') %}{{ age }}-{{ who | length }};{% endfor %}{{ words | groupby(0) | list | length }} {{ people | groupby('zip', default='none') | map(attribute='grouper') | list }} {{ words | groupby('0') | map('first') | list }}",
    "{% set g = list | map('string') %}{{ g | first }}{{ g | list }}{{ g | list }}{{ 'T' if [] | select else 'F' }}{{ g is iterable }}{{ g is sequence }}{{ g is mapping }}",
    "{{ [3, 1] | sort | first }} {{ {'b': 1, 'a': 2} | sort }} {{ [[2, 'b'], [1, 'a']] | sort }} {{ [(2, 1), (1, 2)] | sort(attribute=1) }} {{ [true, 0, 2] | sort }}",
    "{{ list[::-1] | join }} {{ (list + [9])[-1] }} {{ list | reverse | first }} {{ list | length - 1 }} {{ list | first + 1 }} {{ -list | first if no else 'ok' }}",
])
group("filter.json", [
    "{{ nested | tojson }}|{{ list | tojson }}|{{ mixed | tojson }}|{{ (1, 'a') | tojson }}",
    "{{ nested | tojson(indent=2) }}|{{ [] | tojson(indent=2) }}|{{ {} | tojson(indent=2) }}|{{ [[], {}, [1]] | tojson(indent=1) }}",
    "{{ nested | tojson(indent=0) }}|{{ list | tojson(indent='\t') }}|{{ list | tojson(separators=(',', ':')) }}|{{ nested | tojson(separators=(', ', ': '), indent=1) }}|{{ list | tojson(indent=none) }}",
    "{{ nested | tojson(sort_keys=true) }}|{{ {'b': 1, 'a': {'d': 1, 'c': 2}} | tojson(sort_keys=true, indent=1) }}",
    "{{ quotes | tojson }}|{{ uni | tojson }}|{{ uni | tojson(ensure_ascii=true) }}|{{ quotes | tojson(true) }}|{{ '</script>&\\'' | tojson }}|{{ '\\u2028/' | tojson }}",
    "{{ 1 | tojson }} {{ 1.0 | tojson }} {{ 1e22 | tojson }} {{ tiny | tojson }} {{ true | tojson }} {{ none | tojson }} {{ 'a' | tojson }} {{ (1e308 * 10) | tojson }} {{ big | tojson }} {{ (-1e308 * 10) | tojson }}",
    "{{ {1: 'a', none: 'b', true: 'c', 2.5: 'd'} | tojson }} {{ {'a': {'b': [{'c': none}]}} | tojson }} {{ ('<' | safe) | tojson }}",
    "{{ people | tojson | length }} {{ people | map('tojson') | join(';') }} {{ 'a\\nb' | tojson | tojson }}",
])
for i, expr in enumerate(["nested.missing | tojson", "[x] | tojson", "range(3) | tojson", "nested.items() | tojson", "namespace() | tojson", "'a'.upper | tojson", "(list | map('string')) | tojson", "{(1, 2): 3} | tojson",
                          "'a' | nosuchfilter", "'a' is nosuchtest", "list | join(attribute='x') | nosuch", "'abc' | truncate(2)", "list | sort(foo=1)", "'a' | upper(1)", "'a' | replace('b')", "[1, 'a'] | sort", "[1, none] | max",
                          "people | sum", "['a'] | sum", "5 | join", "5 | dictsort", "[1] | items | list", "'x' | round", "2.5 | round(1, 'up')", "'x' | abs", "list | map | list", "list | map('nosuch') | list", "list | select('nosuch') | list", "people | selectattr | list",
                          "[[1]] | unique | list", "5 | indent", "nested | groupby('a')", "{[1]: 2}", "1e400 | int", "'abc' | format(1)", "'%d' | format('a')", "(list | map('string')) | length", "(list | map('string')) | last"]):
    case(f"filter.fail.{i:02d}", "{{ " + expr + " }}")

# ---- tests ----
VALUES = ["i", "f", "zero", "nil", "yes", "no", "s", "empty", "list", "nested", "(1, 2)", "range(2)", "x", "nested.items()", "list | map('string')", "namespace()", "'a'.upper", "raise_exception", "s | safe"]
for t in ["defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "true", "false", "mapping", "sequence", "iterable", "callable", "escaped"]:
    case(f"test.{t}", "".join("{{ (%s) is %s }} " % (v, t) for v in VALUES))
group("test.args", [
    "{{ 3 is odd }} {{ 3 is even }} {{ -3 is odd }} {{ 2.0 is even }} {{ 9 is divisibleby 3 }} {{ 9 is divisibleby(2) }} {{ true is odd }}",
    "{{ 1 is eq 1 }} {{ 1 is equalto(1.0) }} {{ 1 is ne 2 }} {{ 1 is lt 2 }} {{ 1 is le 1 }} {{ 2 is gt 1 }} {{ 1 is ge 2 }} {{ 1 is lessthan 2 }} {{ 1 is greaterthan 2 }} {{ 'a' is in 'abc' }} {{ 1 is in [1] }} {{ 1 is not in [1] }}",
    "{{ 'abc' is lower }} {{ 'ABC' is upper }} {{ 'Abc' is lower }} {{ '' is lower }} {{ 5 is upper }} {{ 'a1' is lower }} {{ none is upper }}",
    "{{ yes is sameas true }} {{ 1 is sameas true }} {{ nil is sameas none }} {{ list is sameas list }} {{ list is sameas [3, 1, 2] }} {{ no is sameas(false) }}",
    "{{ i is not none }} {{ not i is none }} {{ i is defined and i is number }} {{ i is string or i is number }} {{ 'a' if i is odd else 'b' }} {{ (i is odd) is true }} {{ i is not defined }} {{ nil is not none and nil.x }}",
    "{% if messages is sequence and messages is not string and messages is not mapping %}seq{% endif %}{% if messages[0].content is string %}str{% endif %}{{ messages[0].role is eq('user') }}",
])

# ---- methods ----
group("method.text", [
    "[{{ ws.strip() }}] [{{ ws.lstrip() }}] [{{ ws.rstrip() }}] [{{ 'xxaxx'.strip('x') }}] [{{ 'abcba'.lstrip('ab') }}] [{{ 'abcba'.rstrip('ab') }}] [{{ ' a '.strip(none) }}] [{{ 'éaé'.strip('é') }}] [{{ 'abc'.strip('') }}]",
    "{{ csv.split(',') }} {{ csv.split(',', 1) }} {{ csv.split(',', maxsplit=2) }} {{ s.split() }} {{ ws.split() }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a  b '.split(' ') }} {{ s.split(none, 1) }} {{ 'a b  c '.split(maxsplit=1) }} {{ 'aXXbXX'.split('XX') }} {{ csv.split('zz') }} {{ csv.split(',', 0) }}",
    "{{ csv.rsplit(',') }} {{ csv.rsplit(',', 1) }} {{ s.rsplit(none, 1) }} {{ ' a b  c '.rsplit(none, 2) }} {{ 'aaa'.rsplit('aa') }} {{ ''.rsplit(',') }} {{ '  '.rsplit() }} {{ csv.rsplit(',', 0) }}",
    "{{ lines.splitlines() }} {{ lines.splitlines(true) }} {{ ''.splitlines() }} {{ '\n'.splitlines() }} {{ 'a\x0bb\x0cc\x1cd\x85e'.splitlines() }} {{ 'a'.splitlines(keepends=true) }}",
    "{{ csv.partition(',') }} {{ csv.rpartition(',') }} {{ csv.partition('zz') }} {{ csv.rpartition('zz') }}",
    "{{ s.startswith('The') }} {{ s.startswith(('A', 'T')) }} {{ s.endswith('fox') }} {{ s.endswith('x', 0, 3) }} {{ s.startswith('quick', 4) }} {{ s.startswith('') }} {{ ''.endswith('a') }} {{ s.startswith('quick', 4, 6) }} {{ s.endswith(()) }} {{ s.startswith('', 99) }} {{ s.startswith('q', -15) }}",
    "{{ s.replace('o', '0') }} {{ s.replace('o', '0', 1) }} {{ 'abc'.replace('', '-') }} {{ 'aaaa'.replace('aa', 'a') }} {{ s.replace('zz', 'y') }} {{ 'aa'.replace('a', 'b', 0) }} {{ 'é'.replace('', '.') }}",
    "{{ s.upper() }} {{ s.lower() }} {{ s.title() }} {{ s.capitalize() }} {{ s.swapcase() }} {{ uni.upper() }} {{ uni.lower() }} {{ uni.title() }} {{ uni.capitalize() }} {{ uni.casefold() }} {{ uni.swapcase() }} {{ \"it's a_b x2y 3rd\".title() }}",
    "{{ s.find('quick') }} {{ s.find('zz') }} {{ s.rfind('o') }} {{ s.index('Q' | lower) }} {{ s.find('o', 13) }} {{ s.find('o', 0, 5) }} {{ uni.find('東') }} {{ uni.rfind('Σ') }} {{ s.count('o') }} {{ 'aaa'.count('aa') }} {{ 'abc'.count('') }} {{ s.count('o', 13) }} {{ s.find('') }} {{ s.find('', 99) }} {{ s.rfind('') }} {{ s.find('e', -5) }} {{ s.rindex('o') }} {{ s.rfind('o', 0, 14) }}",
    "{{ ','.join(['a', 'b']) }} {{ ''.join(words) }} {{ ', '.join('abc') }} {{ '-'.join([]) }}| {{ '-'.join({'a': 1, 'b': 2}) }} {{ '-'.join(words | map('upper')) }}",
    "{{ '12'.isdigit() }} {{ '1a'.isdigit() }} {{ '²'.isdigit() }} {{ '²'.isdecimal() }} {{ '½'.isnumeric() }} {{ 'ab'.isalpha() }} {{ 'é1'.isalnum() }} {{ ' '.isspace() }} {{ ''.isspace() }} {{ 'a b'.isalpha() }} {{ 'abc'.islower() }} {{ 'ABC1'.isupper() }} {{ 'Ab Cd'.istitle() }} {{ 'Ab cd'.istitle() }} {{ 'abc'.isascii() }} {{ 'é'.isascii() }} {{ ''.isascii() }} {{ '東'.isalpha() }} {{ '١'.isdigit() }}",
    "{{ '5'.zfill(3) }} {{ '-5'.zfill(4) }} {{ 'a'.ljust(3) }}| {{ 'a'.rjust(3, '*') }} {{ 'a'.center(4, '.') }} {{ 'ab'.center(5, '.') }} {{ 'abc'.center(2) }} {{ 'é'.ljust(3, '東') }} {{ '5'.zfill(0) }}",
    "{{ 'TestHook'.removeprefix('Test') }} {{ 'TestHook'.removesuffix('Hook') }} {{ 'x'.removeprefix('y') }} {{ 'aaa'.removesuffix('a') }} {{ 'a'.removesuffix('') }}",
    "{{ messages[0].content.strip().split('x') }} {{ s.split(' ')[-1].upper() }} {{ s.split('quick')[0].rstrip() ~ '|' }} {{ ('a' * 3).replace('a', 'b').upper() }} {{ 'a,b'.split(',') | join(' ') }} {{ (s | upper).startswith('THE') }}",
])
group("method.container", [
    "{{ list.index(1) }} {{ list.count(3) }} {{ list.copy() }} {{ (1, 2, 1).count(1) }} {{ (1, 2).index(2) }} {{ nested.copy() == nested }} {{ words.index('fig', 1) }} {{ range(3).index(2) }}",
    "{{ nested.b.keys() | list }} {{ nested.b.values() | list }} {{ nested.b.items() | list }} {{ 'a' in nested.keys() }} {{ nested.keys() | length }} {{ nested.values() | first }} {{ (nested.items() | list)[1][0] }} {{ nested.keys() | sort }} {{ nested.keys() | join(',') }}",
    "{{ list.append is defined }} {{ nested.pop is defined }} {{ list.append | default('no') }} {{ nested.update is undefined }} {{ list.foo is defined }}",
])
for i, expr in enumerate(["list.append(1)", "nested.update({})", "nested.pop('a')", "list.pop()", "nested.clear()", "list.sort()", "nested.setdefault('z', 1)", "csv.split('')", "s.index('zz')", "list.index(99)", "','.join([1])", "'a'.startswith(1)",
                          "s.nosuch()", "'a'.center(3, 'xx')", "'{} {}'.format(1)", "'{'.format(1)", "'{x}'.format(1)", "s.upper(1)", "nested.get()", "nested.get([1])", "'a'.replace('b')", "s()", "list()", "'%d' % 'a'", "'%s %s' % 'a'", "'%s' % (1, 2)", "'%z' % 1", "'%(a)s' % {'b': 1}", "'%(a)s' % 1",
                          "1 + 'a'", "'a' + 1", "'a' - 'b'", "[1] + (2,)", "[1] + 'a'", "1 / 0", "1 // 0", "1 % 0", "1.0 / 0", "0 ** -1", "(-8.0) ** 0.5 < 1", "1e200 ** 2", "1 < 'a'", "none < 1", "[1] < 'a'", "{} < {}", "1 in 1", "1 in 'a'", "1 in none", "'a' * 'b'", "-'a'", "+[]", "list['a':]", "list[::0]", "nested[1:2]",
                          "[1] - [1]", "'a' * 2.0", "{} + {}"]):
    case(f"op.fail.{i:02d}", "{{ " + expr + " }}")

# ---- statements ----
group("for", [
    "{% for x in list %}{{ x }}{% endfor %} {% for x in [] %}a{% else %}b{% endfor %} {% for x in list %}{{ x }}{% else %}b{% endfor %}",
    "{% for x in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }} {% endfor %}",
    "{% for x in list %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }} {{ loop.previtem is defined }} {{ loop.nextitem is defined }};{% endfor %}",
    "{% for x in words %}{{ loop.cycle('a', 'b') }}{{ loop.changed(x | lower) }} {% endfor %}",
    "{% for x in list if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }}{{ loop.last }} {% else %}none{% endfor %} {% for x in list if x > 9 %}a{% else %}none{% endfor %}",
    "{% for a, b in [[1, 2], (3, 4), 'xy'] %}{{ a }}-{{ b }} {% endfor %}{% for a, (b, c) in [[1, [2, 3]]] %}{{ a }}{{ b }}{{ c }}{% endfor %}{% for (a, b) in [[1, 2]] %}{{ a }}{{ b }}{% endfor %}",
    "{% for x in list %}{% for y in list %}{{ loop.index }}{% endfor %}{{ loop.index }} {% endfor %}",
    "{% for x in list %}{% set outer = loop %}{% for y in 'ab' %}{{ outer.index }}{{ y }}{{ loop.last }}{% endfor %}{% endfor %}",
    "{% for c in 'aé😀' %}[{{ c }}]{% endfor %}{% for x in (1, 2) %}{{ x }}{% endfor %}{% for x in range(3) %}{{ x }}{% endfor %}{% for x in 1, 2, 3 %}{{ x }}{% endfor %}",
    "{% for x in list %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %} {% for x in list %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in [1] %}{% break %}{% else %}E{% endfor %} {% for x in [1] %}{% continue %}{% else %}E{% endfor %} {% for x in [1, 2] %}{% if loop.first %}{% continue %}{% endif %}{% else %}E{% endfor %}",
    "{% for x in list %}{% for y in list %}{% if y == 2 %}{% break %}{% endif %}{{ y }}{% endfor %}{% if loop.last %}{% break %}{% endif %}|{% endfor %}",
    "{% set x = 'o' %}{% for y in list %}{% set x = y %}{{ x }}{% endfor %}{{ x }} {% for x in list %}{% endfor %}{{ x }}",
    "{% for y in list %}{{ z }}{% set z = y %}{{ z }}{% endfor %}{{ z is defined }} {% set q = 1 %}{% for y in list %}{{ q }}{% if loop.first %}{% set q = 5 %}{% endif %}{{ q }}{% endfor %}",
    "{% for m in messages %}{{ loop.index0 is odd }}{{ m.role }}{% endfor %}{% for m in messages[::-1] %}{{ m.content }}{% endfor %}{% for m in messages[1:] %}x{% else %}none{% endfor %}",
    "{% set ns = namespace(stop=false) %}{% for x in list if not ns.stop %}{{ x }}{% if x == 1 %}{% set ns.stop = true %}{% endif %}{% endfor %}",
    "{% for x in list if not x is divisibleby 2 %}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{% endfor %}",
    "{% for x in list %}{{ loop.length }}{% endfor %}{% for x in list | map('string') %}{{ loop.length }}{{ loop.last }}{% endfor %}{% for x in nested.items() %}{{ loop.length }}{% endfor %}",
    "{% for i in range(2, 8, 3) %}{{ i }} {% endfor %}{% for i in range(3, 0, -1) %}{{ i }} {% endfor %}{{ range(0) | list }}{{ range(-3) | list }}{{ range(5, 2) | list }}{{ range(3)[-1] }}{{ range(10)[2:4] | list }}{{ 2 in range(3) }}{{ range(4) | length }}",
    "{% for x in list %}{% filter upper %}a{{ x }}{% if x == 1 %}{% break %}{% endif %}{% endfilter %}{% endfor %}|{% for x in list %}{% set y %}b{% if x == 1 %}{% continue %}{% endif %}{% endset %}{{ y }}{{ x }}{% endfor %}",
    "{% for x in list: %}{{ x }}{% endfor %}{% if yes: %}a{% endif %}",
    "{% for x in (list if yes else words) %}{{ x }}{% endfor %}{% for x in list or words %}{{ x }}{% endfor %}{% for x in list + [4] %}{{ x }}{% endfor %}",
])
group("if", [
    "{% if yes %}a{% endif %}{% if no %}b{% else %}c{% endif %}{% if no %}d{% elif yes %}e{% else %}f{% endif %}{% if no %}{% elif no %}{% else %}g{% endif %}",
    "{% for v in [0, 1, '', 'a', [], [0], {}, {'a': 1}, none, true, false, 0.0, 0.1, ()] %}{{ 'T' if v else 'F' }}{% endfor %}{{ 'T' if namespace() else 'F' }}{{ 'T' if range(0) else 'F' }}{{ 'T' if {}.items() else 'F' }}",
    "{% if i == 7 and not no or x %}a{% endif %}{% if 'a' in words or 'fig' in words %}b{% endif %}{% if (i > 5) != (n > 5) %}c{% endif %}{% if messages[0]['role'] != 'system' %}d{% endif %}{% if not messages[3] %}e{% endif %}",
    "{% if yes %}{% set x = 1 %}{% else %}{% set x = 2 %}{% endif %}{{ x }}{% if no %}{% set w = 1 %}{% endif %}{{ w is defined }}",
    "{% if no, %}a{% else %}b{% endif %}{% if 0, 0 %}c{% endif %}",
])
group("set", [
    "{% set a = 1 %}{% set b, c = 2, 3 %}{% set d = 4, 5 %}{% set (e, f2) = [6, 7] %}{{ a }}{{ b }}{{ c }}{{ d }}{{ e }}{{ f2 }}",
    "{% set a %}x{{ i }}y{% endset %}{{ a }}{{ a is string }}{% set b | upper %}abc{% endset %}{{ b }}{% set c | replace('a', 'b') | upper %}aac{% endset %}{{ c }}{% set d | trim | length %} abc {% endset %}{{ d + 1 }}",
    "{% set ns = namespace(a=1, b='x') %}{% set ns.a = ns.a + 1 %}{% set ns.c = [1] %}{{ ns.a }}{{ ns.b }}{{ ns.c }}{{ ns.d is defined }}{{ ns['a'] }}{{ ns }}",
    "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a + ns.b }}{% set ns2 = namespace([['p', 1]]) %}{{ ns2.p }}{% set ns.a, ns.b = 5, 6 %}{{ ns.a }}{{ ns.b }}{% set ns.t %}blk{% endset %}{{ ns.t }}",
    "{% set ns = namespace(n=0, text='') %}{% for x in list %}{% set ns.n = ns.n + x %}{% set ns.text = ns.text ~ x %}{% endfor %}{{ ns.n }}{{ ns.text }}",
    "{% set a = 1 %}{% with a = 2, b = a %}{{ a }}{{ b }}{% set a = 3 %}{{ a }}{% endwith %}{{ a }}{{ b is defined }}{% with %}{% set q = 1 %}{{ q }}{% endwith %}{{ q is defined }}",
    "{% set a = 1 %}{% set a = a + 1 %}{% set i = i + 1 %}{{ a }}{{ i }}{% set messages = messages + [{'role': 'x', 'content': 'y'}] %}{{ messages | length }}{% set x = x | default(5) %}{{ x }}",
    "{% set a = [1, 2] %}{% set a = a + [3] %}{{ a }}{% set d = dict(a=1, b=2) %}{{ d }}{{ dict() }}{{ dict({'x': 1}, y=2) }}{{ dict([['k', 'v']]) }}{% set d2 = dict(d, c=3) %}{{ d2 }}",
    "{% set f = 'x' if no else 'y' %}{{ f }}{% set g = i > 5 %}{{ g }}{% set h = not g %}{{ h }}",
    "{% filter upper %}a{{ s }}{% endfilter %}{% filter replace('a', 'b') | upper %}aac{% endfilter %}{% filter trim %} x {% endfilter %}",
    "{% generation %}a{{ i }}{% set loc = 1 %}{% endgeneration %}{{ loc is defined }}{% for x in list %}{% generation %}{{ x }}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "{% set j = joiner(', ') %}{% for x in list %}{{ j() }}{{ x }}{% endfor %}{% set k = joiner() %}{{ k() }}{{ k() }}",
])
group("macro", [
    "{% macro m(a, b='x', c=none) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, 2) }} {{ m(1, c=3) }} {{ m(b=1, a=2) }} {{ m() }} {{ m(*[1, 2]) }} {{ m(**{'a': 5, 'b': 6}) }} {{ m(1, *[2], **{'c': 3}) }}",
    "{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{% macro n(a, b=a ~ '!', c=b) %}{{ c }}{% endmacro %}{{ n('z') }}",
    "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, x=3) }}{{ m() }}",
    "{% macro m(x) %}[{{ x }}|{{ caller() }}]{% endmacro %}{% call m(1) %}body{{ i }}{% endcall %}",
    "{% macro m(xs) %}{% for x in xs %}{{ caller(x, loop.index) }};{% endfor %}{% endmacro %}{% call(v, n=0) m(list) %}{{ v }}/{{ n }}{% endcall %}",
    "{% macro fact(n) %}{% if n < 2 %}1{% else %}{{ n * fact(n - 1) | int }}{% endif %}{% endmacro %}{{ fact(10) }}",
    "{% macro tree(t, level=0) %}{% for k, v in t.items() %}{{ '  ' * level }}{{ k }}\n{% if v is mapping %}{{ tree(v, level + 1) }}{% endif %}{% endfor %}{% endmacro %}{{ tree(nested) }}",
    "{% macro m() %}{{ later }}{% endmacro %}{% set later = 'L' %}{{ m() }}{% set later = 'M' %}{{ m() }}",
    "{% set v = 1 %}{% macro m() %}{% set v = 2 %}{{ v }}{% endmacro %}{{ m() }}{{ v }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m('x') | upper }}{{ m('x') ~ m('y') }}{{ m('abc') | length }}{{ m }}{{ m is callable }}{{ m('a') is string }}",
    "{% macro m(a) %}{{ a is defined }}{{ a }}{% endmacro %}{{ m() }}{{ m(none) }}",
    "{% macro outer() %}{% macro inner(x) %}<{{ x }}>{% endmacro %}{{ inner(1) }}{% endmacro %}{{ outer() }}{{ inner is defined }}",
    "{% for x in list %}{% macro m() %}{{ x }}{{ loop.index }}{% endmacro %}{{ m() }}{% endfor %}",
    "{%- macro m(a) -%}\n  {{ a }}\n{%- endmacro -%}\n\n{{ m(1) }}\n{{ m(2) }}",
    "{% macro m(a, caller=none) %}{{ a }}{{ caller is none }}{% endmacro %}{{ m(1) }}",
    "{% macro wrap() %}({{ caller() }}){% endmacro %}{% call wrap() %}{% call wrap() %}x{% endcall %}{% endcall %}",
    "{% macro m(d) %}{% for k in d %}{{ k }}{{ d[k] }}{% endfor %}{% endmacro %}{{ m({'a': 1}) }}{{ m(d={'b': 2}) }}",
])
for i, template in enumerate([
    "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{% endmacro %}{{ m(b=1) }}", "{% macro m(a) %}{% endmacro %}{% call m(1) %}x{% endcall %}", "{% macro m() %}{{ caller() }}{% endmacro %}{{ m() }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for a, b in [[1]] %}{% endfor %}", "{% for a, b in [1] %}{% endfor %}", "{% for x in 5 %}{% endfor %}", "{% for x in none %}{% endfor %}", "{% set a, b = 1 %}", "{% set a, b = [1, 2, 3] %}", "{% set i.x = 1 %}", "{% set zz.x = 1 %}", "{% set ns = namespace(_a=1) %}", "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "{{ range(1000001) }}", "{{ range(1, 2, 0) }}", "{{ range() }}", "{{ range('a') }}", "{{ namespace(1) }}", "{{ dict([1]) }}", "{{ raise_exception() }}", "{{ strftime_now() }}", "{% call i() %}x{% endcall %}",
]):
    case(f"statement.fail.{i:02d}", template)
for i, template in enumerate([
    "{% if yes %}", "{% endif %}", "{% for x in list %}", "{% for %}{% endfor %}", "{% for x list %}{% endfor %}", "{{ }}", "{{ a b }}", "{{ 'abc }}", "{{ (1 }}", "{{ 1) }}", "{{ [1}", "{% set %}", "{% set 1 = 2 %}", "{% set true = 2 %}", "{% nosuch %}", "{% if %}{% endif %}", "{{ 1 + }}", "{{ a. }}", "{{ a[ }}", "{{ a[] }}", "{{ f(a=1, 2) }}",
    "{# never closed", "{% raw %} never closed", "{{ never closed", "{% never closed", "{% macro m %}{% endmacro %}", "{% macro m(a=1, b) %}{% endmacro %}", "{% break %}", "{% continue %}", "{% macro m() %}{% break %}{% endmacro %}", "{{ 'a' is string is string }}", "{{ a | }}", "{{ a is }}", "{% else %}", "{% if yes %}{% else %}{% else %}{% endif %}",
    "{{ $ }}", "{{ a ? b : c }}", "{{ 'a' | upper | }}", "{{ {1} }}", "{{ {'a': } }}", "{{ x if }}", "{% elif %}", "{{ 007 }}", "{{ a..b }}", "{% set a = b = 1 %}", "{% include 'x' %}", "{% extends 'x' %}", "{% import 'x' as y %}", "{% do list.append(1) %}", "{% call 5 %}{% endcall %}", "{% for x in list %}{% endif %}", "{{ \"\\x4\" }}", "{{ '\\u12' }}", "{% set x = %}",
    "{{ not }}", "{{ a not b }}", "{{ * }}", "{{ f(**a, b) }}", "{% filter %}{% endfilter %}", "{{ a! }}", "{{ (, ) }}", "{{ [1 2] }}", "{% with a %}{% endwith %}", "{% endfor %}", "{{ a | 5 }}",
]):
    case(f"syntax.fail.{i:02d}", template)
group("raise", [
    "{{ raise_exception('stop: ' ~ messages[0].role) }}", "{% if messages[0].role != 'system' %}{{ raise_exception(\"Only 'system' first, not \\\"\" + messages[0].role + '\"!\\nSecond line') }}{% endif %}", "a{% set x = raise_exception('in set') %}", "{% for x in list if raise_exception('é') %}{% endfor %}",
    "{% macro m() %}{{ raise_exception('in macro') }}{% endmacro %}{{ m() }}", "{{ raise_exception('') }}", "{{ 'x' if yes else raise_exception('not reached') }}",
])
group("global", [
    "{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%d %b %Y') }} {{ strftime_now('%H:%M:%S %p %I') }} {{ strftime_now('%A %a %B %j %U %w %y %%') }} {{ strftime_now('%-d/%-m') }} {{ strftime_now('') }}| {{ strftime_now is defined }} {{ strftime_now('%e %D %F %T %R') }} {{ strftime_now('x%Zy%zz%f') }} {{ strftime_now('é %B') }}",
    "{{ bos_token }}{{ eos_token }}{{ pad_token }}|{{ unk_token is defined }}|{{ tools is none }}|{{ documents is none }}|{{ add_generation_prompt }}|{{ date_string }}|{{ tools is defined }}|{{ documents }}",
    "{{ range is callable }} {{ namespace is defined }} {{ raise_exception is defined }} {{ dict is callable }} {{ joiner is defined }}",
])
case("global.bare", "{{ bos_token is defined }}{{ bos_token }}|{{ eos_token | default('none') }}", "bare")

# ---- whole formats ----
case("format.chatml", """{% for turn in messages %}
{{ '<|im_start|>' ~ turn.role ~ '\\n' ~ turn.content ~ '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
""", "chat", "plain", "odd")
case("format.chatml_parts", """{%- if not messages or messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' }}
    {%- if m.content is string %}
        {{- m.content | trim }}
    {%- elif m.content is not none %}
        {%- for part in m.content %}
            {%- if part.type == 'image' %}{{ '<|image|>' }}{% elif 'text' in part %}{{ part.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""", "chat", "plain", "parts", "tools")
case("format.inst", """{%- set ns = namespace(preface='', want='user') -%}
{{ bos_token }}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}
    {%- if not loop.first -%}{{ raise_exception('A system message can only be the first.') }}{%- endif -%}
    {%- set ns.preface = '<<SYS>>\\n' ~ m.content | trim ~ '\\n<</SYS>>\\n\\n' -%}
    {%- continue -%}
  {%- endif -%}
  {%- if m.role != ns.want -%}
    {{ raise_exception('Expected a message of the ' + ns.want + ', got one of the ' + m.role + '.') }}
  {%- endif -%}
  {%- if m.role == 'user' -%}
    {{ '[INST] ' + ns.preface + m.content | trim + ' [/INST]' }}
    {%- set ns.preface, ns.want = '', 'assistant' -%}
  {%- else -%}
    {{ ' ' + (m.content | trim) + ' ' + eos_token }}
    {%- set ns.want = 'user' -%}
  {%- endif -%}
{%- endfor -%}
""", "chat", "plain", "odd")
case("format.headers_tools", """{%- macro header(who) %}{{ '<|start_header_id|>' ~ who ~ '<|end_header_id|>\\n\\n' }}{% endmacro %}
{%- if date_string is undefined %}
    {%- set date_string = strftime_now('%d %b %Y') if strftime_now is defined else 'unknown' %}
{%- endif %}
{%- set first = messages | first %}
{%- set preface = first.content | trim if first.role == 'system' else '' %}
{{- bos_token ~ header('system') }}
{%- if tools %}
    {{- 'Environment: ipython\\n' }}
{%- endif %}
{{- 'Date: ' + date_string + '\\n\\n' }}
{%- for t in tools or [] %}
    {{- t | tojson(indent=4) }}
    {{- '\\n\\n' }}
{%- endfor %}
{{- preface }}{{ '<|eot_id|>' }}
{%- for m in messages[1 if first.role == 'system' else 0:] %}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls | length > 2 %}
            {{- raise_exception('At most two calls at a time, got ' ~ m.tool_calls | length) }}
        {%- endif %}
        {{- header('assistant') }}
        {%- for f in m.tool_calls | map(attribute='function') %}
            {{- '{"name": ' + f.name | tojson + ', "parameters": ' }}
            {{- f.arguments if f.arguments is string else f.arguments | tojson }}
            {{- '}' }}
        {%- endfor %}
    {%- elif m.role in ('tool', 'ipython') %}
        {{- header('ipython') }}
        {{- m.content | tojson if m.content is mapping or m.content is iterable else m.content }}
    {%- else %}
        {{- header(m['role']) + m['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}
""", "chat", "plain", "tools")
case("format.brackets_tools", """{%- set turns = messages | rejectattr('role', 'equalto', 'system') | list %}
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\\n') %}
{%- set asks = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set spoken = namespace(n=0) %}
{%- for t in turns if t.role != 'tool' and not t.tool_calls %}
    {%- if (t.role == 'user') is ne (spoken.n is even) %}
        {{- raise_exception('Turn ' ~ loop.index ~ ' is out of order') }}
    {%- endif %}
    {%- set spoken.n = spoken.n + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for t in turns %}
    {%- if t.role == 'user' %}
        {%- if tools is not none and t == asks[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for f in tools | map(attribute='function') %}
                {{- '{"type": "function", "function": {' }}
                {%- for name, v in f.items() if name != 'return' %}
                    {{- '"%s": ' | format(name) }}
                    {{- '"' ~ v ~ '"' if v is string else v | tojson }}
                    {{- ', ' if not loop.last }}
                {%- endfor %}
                {{- '}}' ~ (']' if loop.last else ', ') }}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' ~ (system ~ '\\n\\n' if loop.last and system) ~ t.content ~ '[/INST]' }}
    {%- elif t.tool_calls is defined and t.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for c in t.tool_calls %}
            {%- if c.id is undefined or c.id | length != 6 %}
                {{- raise_exception('The id of a call has 6 characters.') }}
            {%- endif %}
            {{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}
            {{- ']' + eos_token if loop.last else ', ' }}
        {%- endfor %}
    {%- elif t.role == 'tool' %}
        {%- set body = t.content.content if t.content.content is defined else t.content %}
        {{- '[TOOL_RESULTS] ' ~ {'content': body | string, 'call_id': t.tool_call_id} | tojson ~ '[/TOOL_RESULTS]' }}
    {%- elif t.role == 'assistant' %}
        {{- ' ' + t.content | trim + eos_token }}
    {%- else %}
        {{- raise_exception('There is no role ' ~ t.role) }}
    {%- endif %}
{%- endfor %}
""", "chat", "plain", "tools", "odd")
case("format.thinking", """{%- macro open(role) %}<|im_start|>{{ role }}{{ '\\n' }}{% endmacro %}
{%- set close = '<|im_end|>\\n' %}
{%- set has_system = messages[0].role == 'system' %}
{%- if tools or has_system %}
    {{- open('system') }}
    {%- if has_system %}{{ messages[0].content ~ ('\\n\\n' if tools) }}{% endif %}
    {%- if tools %}
        {{- '<tools>' }}
        {%- for t in tools %}{{ '\\n' ~ t | tojson }}{% endfor %}
        {{- '\\n</tools>\\nCall: <tool_call>{\\"name\\": …, \\"arguments\\": …}</tool_call>' }}
    {%- endif %}
    {{- close }}
{%- endif %}
{#- thoughts are kept only behind the last question #}
{%- set last = namespace(question=messages | length - 1, found=false) %}
{%- for m in messages[::-1] if not last.found %}
    {%- if m.role == 'user' and m.content is string and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set last.found = true %}
        {%- set last.question = messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set text = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- open(m.role) + text + close }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thought = (text.split('</think>') | first).split('<think>')[-1].strip('\\n') %}
            {%- set text = text.rsplit('</think>', 1)[-1].lstrip('\\n') %}
        {%- endif %}
        {{- open('assistant') }}
        {%- if loop.index0 > last.question and (loop.last or thought) %}
            {{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text }}
        {%- for call in m.tool_calls or () %}
            {%- set call = call.function or call %}
            {{- '\\n' if not loop.first or text }}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- close }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ close }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- open('assistant') }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
""", "chat", "plain", "tools", "think", "parts")
case("format.turns", """{{ bos_token }}
{%- set names = {'assistant': 'model'} -%}
{%- set lead = namespace(text='') -%}
{%- for m in messages -%}
    {%- if loop.first and m.role in ['system', 'developer'] -%}
        {%- set lead.text = (m.content if m.content is string else m.content[0].text) ~ '\n\n' -%}
        {%- continue -%}
    {%- endif -%}
    {%- if loop.previtem is defined and loop.previtem.role == m.role -%}
        {{ raise_exception("Two turns of one side: " ~ m.role) }}
    {%- endif -%}
    <start_of_turn>{{ names.get(m.role, m.role) }}
{{ lead.text }}
    {%- set lead.text = '' -%}
    {%- if m.content is string -%}
        {{ m.content | trim }}
    {%- elif m.content is iterable -%}
        {%- for part in m.content -%}
            {{ {'image': '<start_of_image>', 'audio': '<audio>'}.get(part.type, part.text | default('') | trim) }}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("No content in a turn of the " + m.role) }}
    {%- endif -%}
    <end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
""", "chat", "plain", "parts", "odd", "tools")
case("format.tags_one_line", "{% for m in messages %}{% if m['role'] in ['system', 'user', 'assistant'] and m.get('content') %}{{ '<|%s|>\n' % m['role'] + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}", "chat", "plain", "tools")
case("format.roles_documents", """{%- macro turn(role, text) -%}
    <|start_of_role|>{{ role }}<|end_of_role|>{{ text }}<|end_of_text|>{{ '\\n' }}
{%- endmacro -%}
{%- set helps = [] -%}
{%- if tools -%}{%- set helps = helps + ['tools'] -%}{%- endif -%}
{%- if documents -%}{%- set helps = helps + ['documents'] -%}{%- endif -%}
{%- set has_system = messages[0].role is eq 'system' -%}
{%- if has_system -%}
    {%- set system = messages[0].content -%}
{%- else -%}
    {%- set system -%}
        Today is {{ strftime_now('%B %d, %Y') }}.
        {%- if helps %} Use the {{ helps | join(' and the ') }}.{% endif -%}
        {%- if 'citations' in controls and documents %} Cite.{% endif -%}
    {%- endset -%}
{%- endif -%}
{{ turn('system', system) }}
{%- if tools %}{{ turn('tools', tools | tojson(indent=4)) }}{% endif %}
{%- for d in documents or [] %}{{ turn('document ' ~ loop.index, d.text) }}{% endfor %}
{%- for m in messages[has_system | int:] %}
    {%- set calls = '<|tool_call|>' ~ m.tool_calls | map(attribute='function') | list | tojson if m.tool_calls else '' %}
    {{- turn(m.role, (m.content or '') ~ calls) }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_of_role|>assistant' ~ (' ' ~ controls | tojson if controls) ~ '<|end_of_role|>' }}
{%- endif %}
""", "chat", "plain", "tools")
case("format.fullwidth", """{%- set add_generation_prompt = add_generation_prompt | default(false) -%}
{% set st = namespace(outputs=false, system=[]) %}
{%- for m in messages if m.role == 'system' %}
  {%- set st.system = st.system + [m.content] %}
{%- endfor %}
{{- bos_token }}{{ st.system | join('\\n\\n') }}
{%- for m in messages if m.role != 'system' %}
  {%- if st.outputs and m.role != 'tool' %}
    {{- '<｜tool▁outputs▁end｜>' }}
    {%- set st.outputs = false -%}
  {%- endif %}
  {%- if m.role == 'user' %}
    {{- '<｜User｜>' + m.content }}
  {%- elif m.role == 'tool' %}
    {{- '<｜tool▁outputs▁begin｜>' if not st.outputs }}
    {%- set st.outputs = true -%}
    {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
  {%- elif m.role == 'assistant' %}
    {% set said = m.content or '' %}
    {% if '</think>' in said %}
      {% set said = said.partition('</think>')[2] %}
    {% endif %}
    {{- '<｜Assistant｜>' + said }}
    {%- for c in m['tool_calls'] or [] %}
      {{- '<｜tool▁calls▁begin｜>' if loop.first }}
      {{- '<｜tool▁call▁begin｜>' + c['type'] + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' ~ c.function.arguments ~ '\\n```<｜tool▁call▁end｜>' }}
      {{- '<｜tool▁calls▁end｜>' if loop.last else '\\n' }}
    {%- endfor %}
    {{- '<｜end▁of▁sentence｜>' }}
  {%- endif %}
{%- endfor -%}
{{ '<｜tool▁outputs▁end｜>' if st.outputs }}{% if add_generation_prompt and not st.outputs %}{{'<｜Assistant｜><think>\\n'}}{% endif %}""", "chat", "plain", "tools", "think")
case("format.typescript_tools", """{%- macro render_type(spec, required, level=0) -%}
    {%- if spec.enum is defined -%}
        {{- spec.enum | map('tojson') | join(' | ') -}}
    {%- elif spec.type is sequence and spec.type is not string -%}
        {{- spec.type | join(' | ') -}}
    {%- elif spec.type == 'object' -%}
        {{- '{\\n' -}}
        {%- for name, sub in spec.properties.items() -%}
            {%- if sub.description is defined -%}{{- '  ' * (level + 1) ~ '// ' ~ sub.description ~ '\\n' -}}{%- endif -%}
            {{- '  ' * (level + 1) ~ name ~ ('' if name in (spec.required or []) else '?') ~ ': ' ~ render_type(sub, [], level + 1) -}}
            {%- if sub.default is defined -%}{{- ', // default: ' ~ (sub.default if sub.default is string else sub.default | tojson) -}}{%- else -%}{{- ',' -}}{%- endif -%}
            {{- '\\n' -}}
        {%- endfor -%}
        {{- '  ' * level ~ '}' -}}
    {%- elif spec.type in ('integer', 'number') -%}number
    {%- else -%}{{- spec.type | default('any') -}}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
namespace functions {
{% for t in tools %}
{%- set f = t.function %}
// {{ f.description }}
type {{ f.name }} = (_: {{ render_type(f.parameters, f.parameters.required) }}) => any;

{% endfor %}
}
{%- endif %}
{% for m in messages if m.role in ['user', 'assistant'] and m.content %}
<|start|>{{ m.role }}<|message|>{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- endfor %}
""", "tools", "chat")
case("format.previtem_merge", """{%- for m in messages %}
  {%- if loop.previtem and loop.previtem.role == m.role %}{{ '\\n' }}{% else %}{{ '<' ~ m.role ~ '>' }}{% endif %}
  {{- m.content if m.content is string else (m.content or '') | string }}
  {%- if loop.last or loop.nextitem.role != m.role %}{{ '</' ~ m.role ~ '>' }}{% endif %}
{%- endfor %}""", "chat", "odd", "tools")
case("format.generation_mask", "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}", "chat", "think")
case("format.thinking_names", "{% for m in messages %}{{ m.role }}:{{ m.thinking is defined }}:{{ m.reasoning_content | default('-') | trim }}:{{ m.reasoning is defined }}:{{ m.keys() | join(',') }}\n{% endfor %}", "think")


def render(template, spec):
    kwargs = {k: spec[k] for k in ("bos_token", "eos_token") if spec[k]}
    return chat_template_utils.render_jinja_template(
        [spec["messages"]], chat_template=template, tools=spec["tools"], add_generation_prompt=spec["add_generation_prompt"], **kwargs, **spec["extra"])[0][0]


def main():
    chat_template_utils.datetime = FixedDatetime
    cases, surprises = [], []
    for name, (template, input_name) in CASES.items():
        row = dict(name=name, template=template, input=input_name)
        try:
            row["out"] = render(template, INPUTS[input_name])
        except Exception as e:
            row["error"] = f"{type(e).__name__}: {e}"[:200]
            if type(e) is jinja2.exceptions.TemplateError:
                row["raised"] = str(e)
        wants_error = ".fail." in name
        if wants_error != ("error" in row) and "raised" not in row and not name.startswith("format."):
            surprises.append(f"{name}: {template!r} gives {row.get('error', row.get('out'))!r}")
        cases.append(row)
    if surprises:
        sys.exit("\n".join(surprises))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(now=NOW, inputs=INPUTS, cases=cases), indent=0, ensure_ascii=True)
    OUT.write_text(text + "\n")
    print(f"{len(cases)} cases, {sum('out' in c for c in cases)} texts, {sum('raised' in c for c in cases)} raised, "
          f"{sum('error' in c and 'raised' not in c for c in cases)} other errors, {len(text) // 1024} KB")


main()
