"""Small models and graphs in every form that the tests start from."""
