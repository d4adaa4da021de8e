"""Go templates: equal to what Go's own interpreter gave, and unable to stall or to reach out.

`go_templates.jsonl` has a template and its text per line (null where it was refused), made by Go 1.26.8's
`text/template` with Sprig v3 on the values of `_values`.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.core import template_syntax
from enginehouse.core.errors import Invalid
from enginehouse.core.go_template import check, render
from enginehouse.core.template_values import TemplateRecord

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "go_templates.jsonl").read_text().splitlines()]
MAX_SECONDS = 20.0  # of one rendering on a busy machine; the budget usually ends it within one


def _values() -> TemplateRecord:
    return TemplateRecord(
        Input="hi",
        System="",
        L=["a", "b"],
        M={"b": 1, "a": None, "n": {"x": [1.5, "s", None, True]}},
        F=None,
        Fs=[TemplateRecord(Name="f", Description="does <it>", Parameters={"z": 1.0, "a": "<x>&"})],
        I=3,
        B=False,
        Fl=1234567.5,
    )


@pytest.mark.parametrize(("template", "expected"), GOLDEN)
def test_a_template_gives_what_go_gives(template: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(Invalid) as caught:
            render(template, _values())
        assert caught.value.code == "invalid_template"
        assert "line 1" in caught.value.message
    else:
        assert render(template, _values()) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{range 1000000000}}x{{end}}",
        "{{range 100000}}{{range 100000}}{{end}}{{end}}",
        '{{$x := "aaaaaaaaaaaaaaaa"}}{{range 64}}{{$x = print $x $x}}{{end}}',
        '{{$x := "aaaaaaaaaaaaaaaa"}}{{range 64}}{{$x = printf "%s%s" $x $x}}{{end}}',
        '{{$x := "aaaaaaaaaaaaaaaa"}}{{range 64}}{{$x = replace "a" $x $x}}{{end}}',
        '{{$x := "aaaaaaaaaaaaaaaa"}}{{range 64}}{{$x = cat $x $x}}{{end}}',
        '{{$x := "aaaaaaaaaaaaaaaa"}}{{range 64}}{{$x = quote $x $x}}{{end}}',
        '{{$x := "aaaaaaaaaaaaaaaa"}}{{range 64}}{{$x = join $x (list $x $x)}}{{end}}',
        '{{$x := "\\n"}}{{range 64}}{{$x = indent 900 $x}}{{$x = print $x "\\n" $x}}{{end}}',
        "{{$x := list 1}}{{range 64}}{{$x = list $x $x}}{{end}}{{$x}}",
        "{{$x := list 1}}{{range 64}}{{$x = list $x $x}}{{end}}{{toJson $x}}",
        '{{$x := dict "a" 1}}{{range 64}}{{$x = dict "a" $x "b" $x}}{{end}}{{print $x}}',
        "{{$x := list 1}}{{range 5000}}{{$x = list $x}}{{end}}{{$x}}",
        '{{$x := dict "a" 1}}{{range 5000}}{{$x = dict "a" $x}}{{end}}{{toJson $x}}',
        '{{repeat 1000000000 "abc"}}',
        '{{printf "%999999999d" 1}}',
        '{{$x := repeat 100000 "a"}}{{range 100000}}{{$x}}{{end}}',
        '{{$x := repeat 1000000 "a"}}{{range 100000}}{{if contains "b" $x}}{{end}}{{end}}',
        "{{$n := 2}}{{range 100}}{{$n = mul $n $n}}{{end}}{{$n}}",
    ],
)
def test_a_template_that_would_run_or_grow_for_ever_is_ended(template: str) -> None:
    started = perf_counter()
    with pytest.raises(Invalid):
        render(template, _values())
    assert perf_counter() - started < MAX_SECONDS


@pytest.mark.parametrize("opening", ["{{if .I}}", "{{with .I}}", "{{range .L}}", "{{if .B}}{{else}}", "("])
def test_a_template_nested_too_deep_is_refused(opening: str) -> None:
    with pytest.raises(Invalid, match="nested deeper"):
        render(f"{{{{{opening * 5000}}}}}" if opening == "(" else opening * 5000, _values())


def test_long_chains_of_else_if_are_nesting_too() -> None:
    template = "{{if .B}}" + "{{else if .B}}" * 5000 + "{{end}}"
    with pytest.raises(Invalid, match="nested deeper"):
        render(template, _values())


def test_values_have_no_python_attributes() -> None:
    for template in ("{{.Input.__class__}}", "{{.L.append}}", "{{.__class__}}", "{{.M.keys}}", "{{call .Input}}"):
        try:
            assert render(template, _values()) == "<no value>"  # a missing key of a map
        except Invalid:
            continue


def test_a_fault_names_its_line() -> None:
    with pytest.raises(Invalid, match="line 3: the function frobnicate is not supported"):
        render("one\n{{.Input}}\n{{frobnicate 1}}", _values())
    with pytest.raises(Invalid, match=r"line 2: there is no field \.Imput; known are Input,"):
        render("\n{{.Imput}}", _values())


def test_unknown_functions_are_found_before_the_first_request() -> None:
    check("{{if .Anything}}{{range .L}}{{toJson .}}{{end}}{{end}}")
    with pytest.raises(Invalid, match="env is not supported"):
        check('{{if .Rare}}{{range .L}}{{print (env "HOME")}}{{end}}{{end}}')


def test_equal_templates_are_read_once() -> None:
    text = "{{.Input}} once"
    assert template_syntax.parse(text) is template_syntax.parse("{{.Input}}" + " once")


@given(st.text(alphabet='{}-. ()|"`$:=,\\\nabif range end with else.LInputM0123 eq index print', max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_rendered_or_refused(text: str) -> None:
    with contextlib.suppress(Invalid):
        assert isinstance(render(text, _values()), str)


@given(
    st.lists(
        st.sampled_from(
            [
                "{{if .I}}",
                "{{else}}",
                "{{end}}",
                "{{range .L}}",
                "{{.}}",
                "{{$x := .}}",
                "{{$x}}",
                "{{with .M}}",
                " a ",
                "{{break}}",
                "{{- 1 -}}",
                "{{range $k, $v := $.M}}",
                "{{$v | toJson}}",
                "{{else if .B}}",
                "{{continue}}",
            ]
        ),
        max_size=14,
    )
)
@settings(max_examples=300, deadline=None)
def test_any_order_of_blocks_is_rendered_or_refused(pieces: list[str]) -> None:
    with contextlib.suppress(Invalid):
        assert isinstance(render("".join(pieces), _values()), str)
