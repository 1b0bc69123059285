from spurline.spelling import did_you_mean, nearest, several_nearest


def test_the_nearest_choice_is_suggested_with_its_prefix():
    assert did_you_mean("stepz", ["seed", "steps", "dtype"], prefix="--training.") == ". Did you mean --training.steps?"
    assert did_you_mean("zzz", ["seed", "steps"]) == "."


def test_the_cutoff_says_how_far_a_choice_may_be():
    assert nearest("zzz", ["seed", "steps"]) == ""
    assert nearest("zzz", ["seed"], cutoff=0.0) == "seed"
    assert nearest("seed", []) == ""


def test_several_choices_come_most_similar_first():
    assert several_nearest("step", ["seed", "steps", "step"], 2) == ["step", "steps"]
    assert len(several_nearest("zzz", ["seed", "steps", "dtype"], 3, cutoff=0.0)) == 3
