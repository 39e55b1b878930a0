"""The tests, in rooms as in the package."""

import email
from functools import cache

# A package's metadata is parsed as an e-mail each time that somebody asks whether it is installed.
# accelerate asks before every forward pass, which took a sixth of the time of short trainings.
email.message_from_string = cache(email.message_from_string)
