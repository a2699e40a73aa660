"""Word lists that training data is written with.

``words_heldout.py`` holds the lists of the evaluation; no entry of an open class (places, people,
nouns, attributes, topics) may stand in both, which a test checks.
"""


def _split(text: str, sep: str | None = None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(sep) if word.strip())


CITIES = _split(
    """Paris, London, Berlin, Madrid, Rome, Vienna, Tokyo, Osaka, Beijing, Shanghai, Seoul, Delhi,
    Mumbai, Cairo, Lagos, Nairobi, Boston, Chicago, Dallas, Denver, Seattle, Miami, Austin, Toronto,
    Montreal, Sydney, Melbourne, Dublin, Lisbon, Porto, Oslo, Stockholm, Helsinki, Copenhagen,
    Amsterdam, Brussels, Zurich, Geneva, Milan, Naples, Venice, Athens, Istanbul, Moscow, Warsaw,
    Prague, Budapest, Munich, Hamburg, Cologne, Lyon, Nice, Bordeaux, Barcelona, Valencia, Seville,
    New York, Los Angeles, San Francisco, Las Vegas, New Orleans, Hong Kong,
    Kuala Lumpur,
    Mexico City, Rio de Janeiro, Buenos Aires, Cape Town, Tel Aviv, Abu Dhabi, Dubai, Doha, Lima,
    Bogota, Santiago, Havana, Singapore, Bangkok, Hanoi, Jakarta, Manila, Perth, Leeds, Bristol,
    Glasgow, York, Oxford, Bath, Cork, Ghent, Basel, Graz, Krakow, Riga, Vilnius, Minsk, Sofia""",
    ",",
)
COUNTRIES = _split(
    """France, Germany, Spain, Italy, Japan, China, India, Egypt, Kenya, Canada, Mexico, Brazil,
    Norway, Sweden, Finland, Poland, Greece, Turkey, Austria, Ireland, Portugal, Australia,
    USA, UK, Cuba, Iran, Nepal, South Korea, Vietnam, Morocco""",
    ",",
)
NAMES = _split(
    """Anna Ben Carla David Emma Frank Grace Henry Ivan Julia Karl Laura Mark Nina Oscar Paula Quinn
    Robert Sara Tom Ursula Victor Wendy Xavier Yara Zoe Alice Bob Carol Dan Eve Fred Gina Hugo Iris
    Jack Kate Leo Mia Noah Olga Peter Rita Sam Tina Uma Vera Will John Mary Max Lisa Paul Jane"""
)
SURNAMES = _split(
    """Smith Jones Brown Miller Davis Wilson Moore Taylor Clark Lewis Walker Hall Young King Wright
    Scott Green Baker Adams Nelson Hill Berg Klein Novak Rossi Silva Costa Meyer Weber Wagner"""
)
NOUNS = _split(
    """order ticket invoice product customer account user file folder photo song album movie book
    article recipe restaurant flight train bus car bike room table chair lamp window tree flower
    plant animal dog cat horse bird fish river lake mountain island bridge tower castle museum
    library school student teacher course lesson exam game player team match score race ring coin
    bottle glass cup plate knife fork spoon bread cheese apple pear banana orange lemon onion
    potato tomato carrot soup cake coffee tea juice milk meal menu shop store market bank loan
    card payment salary budget price tax house flat office desk printer phone laptop tablet camera
    screen battery cable router server database table_row record report document letter message
    email note task project meeting event calendar alarm timer clock watch sensor motor pump valve
    engine truck ship boat plane rocket satellite planet star moon galaxy comet crystal metal
    stone brick tile wall roof floor kitchen bathroom garage shirt shoe jacket coat hat glove sock
    dress bag box package stamp address street city country region state village farm field forest
    desert storm cloud doctor nurse patient hospital clinic pill vaccine bill contract policy
    claim lawyer court judge police member club band singer concert festival stage actor painter
    poem novel chapter page word letterhead sample test result model dataset token query topic
    channel playlist video podcast episode station platform gate seat passenger driver route trip
    tour guide map acorn album_cover anchor ankle apron arrow ashtray attic_door auction autumn
    axle baby bacon badge balloon bamboo banner barrel basket bathtub beach beam bear beard beetle
    bell belt bench berry bishop blender blossom blueprint board bolt bonus boot border bowl
    bracelet branch brass breakfast breeze brick_wall broom brother brush bucket budget_plan
    buffalo bulb bullet bundle burger bush butcher butter button cabin cabbage cactus cage calf
    camel campaign canal candy cannon canyon captain caravan carton cave ceiling cellist cement
    cereal chain chalk champion channel_list charity cherry chess chicken chin circle circus clay
    clerk cliff cloak cloth clown coast coconut coffin collar colony column comb comedy company
    concrete cookie copper coral corner cotton cousin cover cowboy crab crane cream creek cricket
    crop crowd crown crutch cube cupboard cushion cycle cylinder dairy dagger dancer daughter
    debate deck deer dentist deputy desert_fox detective diagram dialogue diamond diary dice
    dinner diploma director disc dish ditch dolphin donkey donor dragon drawer drill drum duck
    dust eagle earring earth editor egg elbow election elephant embassy emerald emperor envelope
    essay estate evening exhibit expert export fabric factory fairy falcon family farmer fashion
    father feast feather fence fiber fiddle figure filter finger fire flag flame flashlight fleet
    flood flour flute foam folder_name foot football fork_lift fortress fossil frame freezer
    friend frog fruit funeral fur furnace future gadget garden_hose garlic gasoline geese general
    ghost giant ginger girl giraffe goal goat gold goose gown grain grandson grape graph grass
    gravel gravy group guest guard guideline gum gym habit hair hammer hammock hand handle hawk
    haystack headline heart heater hedge helper herb hero highway hill hinge hobby holiday honey
    hood hook hostel hour household hunter hurdle husband ice icon idea igloo image import
    incident index infant ink insect instrument insurance interview iron islander ivory jail jam
    jar jasmine jeans jelly jersey jewel jockey joke journal journey judge_panel jug jungle kennel
    keg keyhole kidney king kite kitten knee knight knot label lace ladder lady lake_house lamb
    land lane laptop_bag laundry lava lawn leaf league leather lecture leg legend lens lesson_plan
    lever liberty license lid lime linen link lion lip liquid list lizard lobster locker log loop
    lotion lunch lung machine magazine magnet maid mailbox manager mango mansion manual maple
    marble march margin marker mask mast master match_box mayor maze meat mechanic medicine melon
    menu_card merchant mermaid metal_rod microphone midnight mill mine mineral minister mint
    mirror mission mixer model_train moment monkey month monument morning mosque moss moth mother
    mouse mouth mud mule muscle mushy musician mustard nail napkin nation nature neck necklace
    needle neighbor nest net nickel night notebook novelist nurse_call nut oak oar oasis oat
    object ocean octopus officer oil olive opera orbit orchid organ ornament ostrich otter oven
    owl owner oyster packet paddle page_mark pain paint palace palm pan panda panel panther pants
    paper parade parcel_box parent park parrot partner party passport pasta path patio pattern
    pavement peach peacock peanut pearl pebble pedal pen pencil penguin pepperoni perfume permit
    pet petal picnic picture pie pig pigeon pile pilgrim pine pioneer pipe pirate pistol pitch
    pizza plain planet_map plank plaster plastic plaza plot plow plug plum pocket podium poet
    point poison police_car polka pond pony pool popcorn porch port portrait possum poster pot
    pottery pouch powder prairie present priest prince princess prison prize problem profile
    program project_plan promise proof property protein public pudding pulley pulse punch puppet
    puppy purse puzzle pyramid quarry quartz queen question quill quilt quiz rabbit raccoon rack
    radar radio rag rail rain rainbow ranch ranger razor reader receipt record_deal reef
    refrigerator region_code relay remedy rent reptile rescue reservoir resort result_set ribbon
    rice rifle robin robot rock rod rope rose row royal rubber ruby rug ruin ruler runner saddle
    safari sail sailor salad salmon salon salt sand sandal sauce saucer sausage saw scale
    scarecrow scarf scene school_bus science scientist scissors scout screw seal season secret
    section seed shadow shampoo shark sheep sheet shelf shell shelter sheriff shield shoulder
    shovel shower shrimp shutter signal silk sink siren sister skate sketch ski skirt skull slave
    sled sleeve slide slipper slope snail snake snow soap soccer soda sofa soil soldier son soul
    spade sparrow speech spice spider spinach spine spoon_rest sponge spot spring square squirrel
    stable staff stair stall statement steak steam steel stem step stereo stick sticker stocking
    stomach stool storm_door story stove stranger straw stream string stripe submarine suburb
    subway sugar suit suitcase summer sun supper surface surgeon survey swamp swan sweater swimmer
    swing sword symbol syrup system tail tailor tank tape target taxi tea_pot teammate teapot tear
    temple tennis tent terminal textbook textile thief thread throat throne thumb thunder tiger
    timber tin tire title toad toast tobacco toe toilet tongue tool tooth top torch tornado
    tortoise towel toy track tractor trade traffic trail train_ticket tray treasure treaty
    triangle tribe trolley trombone trousers trumpet trunk tub tube tulip tunnel turkey turtle
    twig twin type umbrella uncle uniform union unit university valley van vase vault vegetable
    veil velvet vendor verse vessel vest veteran video_call villa vine vinegar virus visitor voice
    volume vote voyage vulture wagon waist waiter wallet walnut walrus war wardrobe warrior wasp
    water wave wax weapon weather wedding weed week weekend whale wheat wheel whip whiskey whistle
    widow wife wind wine wing winner winter wire wizard wolf woman wood wool worker workshop world
    worm wrench wrist yacht yard yarn year yolk youth zebra zipper zone zoo"""
)
ATTRIBUTES = _split(
    """price status size weight height length width age color owner location address name title
    balance stock level speed power temperature pressure humidity rating score rank version state
    date deadline duration distance capacity volume cost fee discount total count number type
    category language author phone email quantity limit quota mode priority progress range charge
    density pitch flavor texture origin destination supplier pattern angle radius diameter gender
    salary profit revenue output input signal bandwidth runtime uptime accuracy precision purity
    strength hardness smell taste mood energy resolution contrast zoom focus exposure gain offset
    delay lag tempo rhythm lifetime value worth demand supply growth decline yield loss damage
    risk threat security permission access role grade class section encoding checksum signature
    timestamp creator editor reviewer approver manager sponsor partner client attendance audience
    viewers followers likes comments shares downloads visits clicks impressions conversions
    interest premium coverage dosage symptoms diagnosis treatment allergy pulse oxygen acidity
    moisture pollution noise visibility rainfall snowfall sunrise sunset tide resistance torque
    horsepower fuel emissions doors trim acceleration braking wheelbase payload usage turnover
    lineage vendor depot ripeness maturity stiffness slope"""
)
ADJECTIVES = _split(
    """red big small old new fast slow cold hot warm dark bright cheap rich quiet loud soft hard
    fresh sweet dry wet happy long short strong weak clean empty full green blue white black
    ancient angry brave busy calm careful clever crazy curious deep dirty dull eager early easy
    elegant fancy fat fierce flat foreign fragile funny giant glad grand great hollow huge humble
    hungry jolly kind large late lazy light little lonely lovely low lucky mad modern nasty neat
    nervous nice noisy odd orange pale plain polite poor pretty proud pure quick rare raw ready
    round royal rude sad safe salty scary secret sharp shiny shy sick silly simple single sleepy
    slim spicy square steep sticky stiff strange sunny super thick thin tidy tight tiny tired
    tough ugly unique vast warm_hearted wicked wide wild wise wonderful yellow"""
)
COLORS = _split("red blue green yellow orange purple black white pink brown gray")
LANGUAGES = _split("French German Spanish Italian Japanese Chinese English Russian Polish Dutch")
CURRENCIES = _split("USD EUR GBP JPY CHF CAD AUD INR dollars euros pounds yen")
UNITS = _split("km miles meters feet inches cm kg pounds grams ounces liters gallons hours minutes")
CONDITIONS = _split("sunny cloudy rainy windy clear snowy foggy stormy")
SIZES = _split("small medium large")
LEVELS = _split("low medium high urgent normal")
DEVICES = _split("lamp heater fan radio oven tv light printer speaker camera pump")
ROOMS = _split("kitchen bedroom bathroom garage office hall basement attic garden")
TICKERS = _split("AAPL MSFT GOOG TSLA AMZN NVDA META IBM ORCL INTC SAP BMW")
GET_VERBS = _split("get, find, fetch, look up, check, show, read, query, retrieve, return", ",")
ACT_VERBS = _split(
    """create, add, delete, remove, update, book, order, send, start, stop, open, close, cancel,
    reserve, schedule, move, copy, rename, save, print, share, edit, track, register, archive, buy,
    sell, lock, enable, submit""",
    ",",
)
TASKS = _split(
    """buy {n}; call {p}; clean the {n}; pay the {n}; meet {p} at noon; water the {n}; send the {n};
    fix the {n}; read the {n}; wash the {n}; {n} for {p}; hello {p}; see you soon; call me back;
    the {n} is ready; bring the {n}; happy birthday {p}; good morning; where is the {n}; {a} {n}""",
    ";",
)
QUERIES = _split(
    """{n}; {a} {n}; {n} near {c}; best {n} in {c}; {n} {m}; {a} {n} {m}; how to fix a {n}; {c} {n};
    history of {c}; {n} for {p}; {w}; {w} {n}; {a} {w}""",
    ";",
)
SYSTEM_PROMPTS = _split(
    """You are a helpful assistant. | You are a helpful AI assistant. | Be brief. | Be concise. |
    You are moonlet-nano. | Answer briefly. | You are a friendly assistant. |
    You are an assistant with access to tools. | Use the tools when needed. |
    You are a helpful assistant that can use tools. | Answer the question. |
    You are a {a} assistant. | You work for a {n} company. | The user is called {p}. |
    You are {p}, an assistant. | Today is {date}. | Help the user with the {n}.""",
    "|",
)
