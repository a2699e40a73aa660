"""Prompts around the tasks: greetings, thanks, identity, abilities, and what must be declined.

The first five groups are composed and split by the hash of the whole prompt; short everyday forms
(``PLAIN``) always belong to training. Prompts to decline come from separate template lists.
"""

GREET_WORDS = (
    "hi", "hello", "hey", "hi there", "hello there", "hey there", "good morning", "good evening",
    "good afternoon", "good day", "howdy", "greetings", "yo", "hiya", "morning", "evening", "heya",
    "hello hello", "hi hi", "welcome", "salut", "hola", "sup", "hey hey", "ahoy", "helo", "hii",
)  # fmt: skip
GREET_NAMES = (
    "", "", "", "", " nano", " moonlet", " bot", " friend", " buddy", " computer", " model", " all",
    " everyone", " assistant", " my friend", " you", " again", " to you", " robot", " machine",
)  # fmt: skip
GREET_TAILS = (
    "", "", "", "", " :)", " nice to meet you", " I am {p}", " my name is {p}", " this is {p} here",
    " nice to see you", " are you there?", " anyone here?", " can you hear me?", " I'm {p}",
    " it's me", " glad to meet you", " I am new here", " this is a test", " let's start",
)  # fmt: skip
MARKS = ("", "", "", "!", "!", ".", "!!", ",", "?")
HOW_PROMPTS = (
    "how are you", "how are you today", "how are you doing", "how is it going", "how's it going",
    "how do you do", "how do you feel", "what's up", "whats up", "are you ok", "are you fine",
    "how have you been", "everything ok", "how is your day", "how's your day", "you good",
)  # fmt: skip
THANK_WORDS = (
    "thanks", "thank you", "thank you very much", "thanks a lot", "many thanks", "thx", "ty",
    "great, thanks", "ok thanks", "thank you so much", "cool, thank you", "perfect, thanks",
    "nice, thanks", "thanks for the help", "thank you for your help", "well done, thanks",
    "good, thank you", "much appreciated", "awesome, thanks", "that helped, thanks",
)  # fmt: skip
BYE_WORDS = (
    "bye", "goodbye", "good bye", "bye bye", "see you", "see you later", "good night", "see ya",
    "bye then", "farewell", "until tomorrow", "have a nice day", "take care", "I have to go",
    "that's all, bye", "talk to you later", "cheers, bye", "ok bye", "see you tomorrow", "ciao",
)  # fmt: skip
WHO_PROMPTS = (
    "who are you", "what are you", "what is your name", "what's your name", "whats your name",
    "are you a bot", "are you human", "are you an AI", "are you a robot", "which model are you",
    "what model are you", "who made you", "tell me about yourself", "introduce yourself",
    "are you ChatGPT", "are you Kimi", "are you a person", "do you have a name", "your name",
    "who am I talking to", "who is this", "what kind of model are you", "what is moonlet-nano",
    "are you real", "are you a language model", "who built you", "what should I call you",
)  # fmt: skip
ABILITY_PROMPTS = (
    "what can you do", "what can you do for me", "what do you do", "what are you able to do",
    "help", "how can you help me", "how can you help", "what are your abilities", "your abilities",
    "what are you good at", "what are your skills", "what can I ask you", "what can i ask",
    "list your abilities", "show me what you can do", "tell me what you can do", "can you help me",
    "what tasks can you do", "what are your features", "what is your purpose", "what can I do here",
    "how do I use you", "what are you for", "which tasks do you know", "what do you know",
    "what are your capabilities", "describe your abilities", "what things can you do",
    "what questions can you answer", "can you help me with something", "I need help", "help me",
    "explain what you can do", "what kind of things can you do", "how does this work",
    "what could you do for me", "what can this model do", "what is your job", "capabilities",
)  # fmt: skip
ASK_PREFIXES = (
    "", "", "", "", "", "please tell me, ", "so, ", "hi, ", "hello, ", "hey, ", "ok, ", "and ",
    "hello! ", "well, ", "tell me: ", "hi! ", "sorry, ", "now, ", "good morning, ", "excuse me, ",
)  # fmt: skip
ASK_TAILS = (
    "?",
    "?",
    "?",
    "",
    "",
    "??",
    " please?",
    "?!",
    " exactly?",
    " now?",
    ", please?",
    " today?",
)
PLAIN = frozenset(
    {
        "hi", "hi!", "hello", "hello!", "hey", "hey!", "thanks", "thanks!", "thank you", "bye",
        "thank you!", "goodbye", "who are you?", "what can you do?", "what can you do", "help",
        "hello.", "hi there!", "good morning", "how are you?", "who are you", "what are you?",
        "what is your name?", "hi there", "hello there", "good morning!", "good evening",
    }
)  # fmt: skip

DECLINE = (
    "Who wrote {q}?", "Write a poem about {n}.", "write me a poem",
    "Write a short story about a {n}", "Tell me a joke.", "tell me a joke about a {n}",
    "How do I cook {n}?", "Give me a recipe for {n}.", "Write a Python function that sorts a list.",
    "write code for a {n} in python", "fix my code", "Write a {lang} essay about the {n}.",
    "What is the meaning of life?", "Who is {p} {s}?", "What do you think about {n}?",
    "Do you like {n}?", "what is your opinion on the {a} {n}?", "What is the best {n}?",
    "Which {n} should I buy?", "Explain {n} to me.", "explain how a {n} works", "What is a {n}?",
    "what does {w} mean?", "Define {w}.", "How old is {p} {s}?", "how tall is {p}?",
    "When was {p} {s} born?", "What happened in {year}?", "Who won the {n} in {year}?", "{m}x{k}",
    "Is {m} a prime number?", "How many days are in {m} weeks?", "count to {m}",
    "Summarize this text: {q}", "summarize the book {q}", "What is the chemical formula of {n}?",
    "How do planes fly?", "Why is the sky {color}?", "Can you draw a {n}?", "draw me a {a} {n}",
    "Make a picture of a {n}", "sing a song", "sing for me", "What should I eat today?",
    "Are you happy?", "do you love me?", "Do you believe in {n}?", "can you feel pain?", "I am sad",
    "Tell me a secret.", "Tell me something interesting.", "what is love",
    "give me advice about {n}", "How do I fix my {n}?", "my {n} is broken",
    "Why does my {n} not work?", "My {n} is {a}.", "I want to learn {lang}.", "spell {w}",
    "What rhymes with {n}?", "List five {n} names.", "name three {a} animals",
    "Give me a list of {n}s", "write a letter to my boss", "What is 'the {n}' about?",
    "Who invented the {n}?", "How many {n}s are there in the world?", "what is the largest {n}?",
    "is {c} bigger than {c2}?", "Compare {n} and {n2}.",
    "what is the difference between a {n} and a {n2}?", "Which is better, {n} or {n2}?",
    "Do my homework.", "what is quantum physics?", "Explain relativity.",
    "how does a computer work?", "What is machine learning?", "What is Python?", "def {w}():",
    "import {w}", "print('{q}')", "{w} {w2}", "{n}", "{n} {n2}", "{a} {n}", "{q}", "the {a} {n}",
    "asdf {w}", "{w}?", "{p} likes {n}", "I have {m} {n}s", "I bought a {n} for {m} euros",
    "I live in {c}", "yes", "no", "ok", "The {n} is {a}.", "why?", "maybe", "let's talk about {n}",
    "can you dance", "What color is a {n}?", "is the {n} {a}?", "was {p} in {c}?",
    "should I visit {c}?", "Can I trust {p}?", "hi, write a poem about a {n}",
    "Please write a story.", "what is the {attr} of {w}?", "Who is {p}?", "who is {p} {s}",
    "do you know who {p} {s} is?", "Tell me about {p} {s}", "tell me what {p} thinks",
    "Say something nice", "say something about {n}s", "Tell me something funny about {p}.",
    "Tell me why {p} is {a}", "{p} is a {n}", "{p} and {p} met in {c}",
    "Which animals live in a {n}?", "Which city has the best {n}?", "In which year did {p} die?",
    "Who directed {q}?", "who plays the {n}?", "How do people make a {n}?", "Invent a {a} {n}",
    "compose a march", "improvise a {n} story", "Rate my {n}", "Proofread this: {q}",
    "Is it true that the {n} is {a}?", "How fast is a {n}?", "how big is the {n} of {c}?",
    "what is your favorite {n}", "do {n}s sleep", "What is gravity?", "class of {n}",
    "should we buy a {n}", "how long is a {n}?",
)  # fmt: skip
# these could be meant for a declared tool, so they are declined only where none is declared
DECLINE_TOOL_LIKE = (
    "-{m} + {k}", "what is -{m} - {k}?", "{m} + -{k}", "what is {m}.5 - {k}?",
    "What is the capital of {country}?", "what's the capital of {c}", "Translate {q} to {lang}.",
    "translate this into {lang}: {q}", "What is the weather in {c}?", "What time is it in {c}?",
    "what day is it", "What time is it?", "Book a {n} in {c}.", "Send a message to {p}.",
    "play some music", "Set an alarm for {m} minutes", "What is {m} * {k}?", "{m} * {k}",
    "what is {m} times {k}", "multiply {m} by {k}", "{m} / {k}", "{m} divided by {k}",
    "divide {m} by {k}", "What is {m} divided by {k}?", "{m}^{k}", "the square root of {m}",
    "what is {k} percent of {m}?", "{m}% of {k}", "{b} + {m}", "What is {b} + {m}?", "{b}-{m}",
    "what is {m} plus {b}?", "{m} + {k} + {m}", "what is {m} + {k} - {k}?", "{m} + {k} * {m}",
    "add {m}, {k} and {m}", "sin({m})", "{m}.{k} + {k}", "Solve x + {m} = {k}", "log of {m}",
    "What is the price of a {n}?", "How many people live in {c}?", "How far is {c} from {c2}?",
    "Where is {c}?", "Where is the {n}?", "who is the president of {country}?",
    "Tell me about {c}.", "Tell me about the history of {country}.", "Recommend a {n} for {p}.",
    "Plan a trip to {c}.", "find me a {n}", "What is the news today?",
    "give me the latest news about {n}", "Who is the king of {country}?",
    "How do you say {n} in {lang}?", "Write an email to {p}.", "Write a song about {c}",
    "SELECT * FROM {n}", "Let's play a game", "hello, what is the capital of {country}?",
    "Please translate {n}", "please book a {n} for {p}", "Could you recommend a {n}?",
    "open the {n}", "turn on the {n}", "search for {q}", "look up {q}", "get the {attr} of the {n}",
    "delete the {n}", "create a {n} called {w}", "convert {m} km to miles", "remind me to {q}",
    "{m} cubed", "square {m}", "what is {m} squared times {k}?", "{m} mod {k}",
    "{m} over {k} over 2",
    "double {m}", "twice {m}", "a third of {m}", "{k} and a half", "is {m} odd?", "round {m}.{k}",
    "{m} in hexadecimal", "{m} in roman numerals", "{m}+{m}+{k}", "{k}+{m}+{k}", "{m} - {k} - {m}",
    "{m} plus {k} plus {m}", "{m} minus {k} minus {k}", "sum of {m}, {k} and {k}", "{m} to the {k}",
    "what's {k} over {m}?", "{m} per {k}", "{b} minus {k}", "take {m} from {b}",
    "{b} and {m}, please",
    "add {b} to {k}", "{m} factorial", "{m} divided by {k}?", "multiply {m} with {k}, please",
    "what time is it", "predict the weather of tomorrow", "Is it sunny in {c}?",
    "how warm is {c} in May?", "ring {p}", "buy a {n}",
    "get me a {a} {n}", "reserve a {n} in {c}", "how much does a {n} cost?",
)  # fmt: skip

DECLINE_HELDOUT = (
    "Who painted the {n}?", "Which river flows through {c}?", "In which country is {c}?",
    "What language do people speak in {country}?", "Compose a haiku on {n}.",
    "rhyme something on {n}",
    "Invent a fairy tale with a {n} in it", "Say something funny", "How would I bake a {n}?",
    "Rewrite this in {lang}: {q}", "implement quicksort in Java",
    "debug this function for me: {w}(x)",
    "generate an SQL query on {n}", "Is it true that {p} {s} lives in {c}?", "how heavy is a {n}",
    "what year did the {n} open?", "Which team won in {year}?", "is it raining in {c}?",
    "What's today's date?", "reserve two seats for the {n}", "call {p}", "order a {n}, please",
    "What is {m} multiplied by {k}?", "{m} times {k} equals?", "{m}*{k}=", "what's {m} over {k}",
    "half of {m}", "{m} squared", "{m} modulo {k}", "factor {m}", "what is {b} minus {m}?",
    "please add {b} and {m}", "{m}+{k}+{k}", "is {m} even?", "convert {m} to binary",
    "{m} to the power {k}",
    "How expensive is a {n}?", "How cold does it get in {c}?", "what currency is used in {country}",
    "Give me a summary of {q}", "Paint a {a} {n}", "hum a tune", "Suggest a {n} to visit in {c}",
    "what movie should we watch", "Are you able to love?", "do you dream", "Cheer me up.",
    "Should I marry {p}?", "how can I repair the {n}?", "Teach me {lang}",
    "what is the plural of {n}",
    "Name some {a} {n}s.", "draft a speech for {p}", "Who discovered the {n}?",
    "is a {n} heavier than a {n2}?",
    "What is the theory of evolution?", "how do vaccines work", "What's a neural network?",
    "class {w}:",
    "console.log({w})", "{n} or {n2}?", "{p} sold the {n}", "I own {m} {n}s",
    "The {n} near {c} is {a}.",
    "Shall we play chess?", "what does a {n} taste like", "do penguins fly", "What is DNA?",
    "Can you predict the future of {country}?", "give me the lyrics of {q}",
    "Describe the {n} of {c}.",
    "why do people buy a {n}?", "tell me who {p} {s} is", "how long does a {n} live?",
    "stock tips please",
)  # fmt: skip
