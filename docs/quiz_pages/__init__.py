"""The quiz, the frequent questions, the certificate and its verification, as HTML and Markdown for the site's pages.

Everything can be read without JavaScript: each question has its options, and its answer with the reason of every option
to unfold. The scripts in ``docs/theme/assets/quiz`` turn that into a quiz; what they need to know is in the file that
:func:`assets` makes.
"""

from .certificates import certificate_html, verify_html
from .data import assets
from .faq import faq_markdown
from .questions import quiz_html

__all__ = ["assets", "certificate_html", "faq_markdown", "quiz_html", "verify_html"]
