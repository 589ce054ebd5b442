import time

import pytest

from grpo_rl.storage.masking import masked, masked_override, masked_text, shown


@pytest.mark.parametrize("name", ["api_key", "apikey", "WANDB_API_KEY", "hf_token", "clientSecret", "passwd"])
def test_a_text_under_the_name_of_a_secret_is_masked_wherever_it_stands(name):
    config = {"logger": {"settings": {name: "abc123", "project": "p", "list": [{name: "abc123"}]}}}
    assert "abc123" not in str(masked(config)) and masked(config)["logger"]["settings"]["project"] == "p"
    for word in (f"+logger.settings.{name}=abc123", f"logger.settings={{{name}: abc123}}", f"x={{{name}: 'abc123'}}"):
        assert "abc123" not in masked_override(word) and "abc123" not in masked_text(f"started with {word} at")


def test_what_is_no_secret_stays_as_it_is():
    config = {"env": {"max_new_tokens": 256, "repeats": 8}, "model": {"tokenizer": "a/b", "name": "https://hub/x@main"}}
    config["env"]["system_prompt"] = prompt = "Answer as JSON with the keys: name, age. key=value won't do"
    config["sampling"] = {"stop": ["token: end"], "stop_token": "</s>"}
    assert masked(config) == config and masked(config, told_apart=True) == config
    words = [f"env.system_prompt={prompt}", "+sampling.stop=['key: x']", "env.max_new_tokens=256", "~logger"]
    assert [masked_override(word) for word in words] == words


@pytest.mark.parametrize("password", ["p", "p@ss", "p/w", "p?w", "#p", "p/w@x"])
def test_user_and_password_of_a_url_are_masked_whole_though_not_percent_encoded(password):
    assert masked_text(f"at https://me:{password}@host:1/x?y=z, and on") == "at https://***@host:1/x?y=z, and on"
    assert masked({"tracking_uri": f"https://me:{password}@host:1/x"}) == {"tracking_uri": "https://***@host:1/x"}
    assert masked_override(f"logger.settings.uri=http://me:{password}@host") == "logger.settings.uri=***"


@pytest.mark.parametrize("name", ["password", "api_key", "hf_token"])
def test_a_secret_of_digits_is_masked_and_counts_are_not(name):
    assert masked({name: 123456, "token_groups": 1}) == {name: "***", "token_groups": 1}
    assert masked_override(f"logger.settings.{name}=123456") == f"logger.settings.{name}=***"
    assert masked_text(f'"{name}": 123456, keys: 7') == f'"{name}": ***, keys: 7'


def test_an_override_that_holds_a_secret_anywhere_is_masked_whole():
    for value in ("{api_key: abc123 def456, p: q}", "{api_keys:[abc123, def456]}", "{credentials: {user: a, m: [b]}}"):
        assert masked_override(f"x={value}") == masked_override("x={secret: 'abc123\\' def456', p: q}") == "x=***"


def test_masked_texts_are_distinguished_without_a_way_back():
    def apart(key, text):
        return masked({key: text}, told_apart=True)[key]

    assert apart("key_column", "a") != apart("key_column", "b") and apart("key_column", "a") == apart("key_column", "a")
    assert masked({"key_column": apart("key_column", "a")}, told_apart=True) == {"key_column": apart("key_column", "a")}
    yes, no = (apart("instructions", f"end with token: {verdict}") for verdict in ("yes", "no"))
    assert yes != no and masked({"instructions": yes}, told_apart=True) == {"instructions": yes}
    # A new password of the same place is the same place.
    assert apart("path", "s3://me:pw@host/x") == apart("path", "s3://me:other@host/x") == "s3://***@host/x"
    # So few digits fit many texts, and can't be used to try a password.
    assert len({apart("password", f"guess-{i}") for i in range(20_000)}) <= 4096


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "text", ["x", "key", "://", "token ", "://x", "key=", "key=[", "key='\\", 'key={"\\', "--key,", "-key', "]
)
def test_a_long_text_takes_no_more_than_its_length(text):
    begun = time.process_time()
    masked_text(text * 100_000)
    assert time.process_time() - begun < 10  # the square of the length would take hours


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("server --api-key abc123", "server --api-key ***"),
        ("server --token 'abc 123' --port 80", "server --token *** --port 80"),
        ("server -password abc123", "server -password ***"),
        ("npx URL --header 'Authorization: Bearer abc123'", "npx URL --header 'Authorization: Bearer ***'"),
        ("curl -H 'Authorization: Basic abc123' x", "curl -H 'Authorization: Basic ***' x"),
        ("curl -H 'Authorization: Bearer 123456' x", "curl -H 'Authorization: Bearer ***' x"),
        ("curl -H 'Authorization: token abc123' x", "curl -H 'Authorization: token ***' x"),
    ],
)
def test_a_secret_that_follows_an_option_is_masked(text, hidden):
    assert masked_text(text) == hidden and masked({"command": text}) == {"command": hidden}
    assert masked_override(f'env.mcp=["{text}", "other"]') == "env.mcp=***"


def test_a_secret_in_a_list_of_arguments_is_masked_behind_its_option():
    words = ["server", "--api-key", "abc 123", "--max-tokens", "64", "--token", "-v", "--pin-secret", "123"]
    hidden = ["server", "--api-key", "***", "--max-tokens", "64", "--token", "-v", "--pin-secret", "***"]
    assert masked({"command": words}) == {"command": hidden} == masked({"command": hidden})
    apart, other = (masked({"command": [*words[:2], key, *words[3:]]}, told_apart=True) for key in (words[2], "abd"))
    assert apart == masked(apart, told_apart=True) != other
    assert masked_text(str(words)) == str(hidden).replace("'***'", "***")
    assert masked_override(f"env.mcp=[{{command: [{', '.join(words)}]}}]") == "env.mcp=***"


@pytest.mark.parametrize("option", ["--password", "--api-key", "--auth.token", "-key"])
@pytest.mark.parametrize("value", [123456, "-1", "abc", "-_abc", "-----BEGIN KEY-----", ["abc"]])
def test_whatever_follows_the_option_of_a_secret_in_a_list_is_masked(option, value):
    hidden = ["***"] if isinstance(value, list) else "***"
    assert masked({"args": ["run", option, value, "x"]}) == {"args": ["run", option, hidden, "x"]}
    assert option in (text := masked_text(str(["run", option, value, "x"]))) and str(value) not in text


def test_what_is_shown_holds_no_secret_of_the_environment_and_is_otherwise_as_it_was_said(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-planted-endpoint")
    monkeypatch.setenv("SHORT_TOKEN", "the")
    said = "it says: Incorrect API key provided: sk-planted-endpoint. You see the \x1b[31mkey\x1b[0m at https://a:b@c/d"
    assert shown(said) == "it says: Incorrect API key provided: ***. You see the key at https://***@c/d"
    text = "json.decoder: KeyError('name'); KeyError: 'name'; give KEY=VALUE, or train.micro_batch_tokens=null"
    assert shown(text) == text
