"""Tasks and environments of other libraries, which are imported where one is named."""
