"""A persona as data: distributions, common ground, schema, and the plan of one conversation."""
